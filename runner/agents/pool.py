# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Poolside's `pool`, headless and standalone: an OpenAI-compatible endpoint instead of a Poolside tenant.

Options of a request (all optional):

    context_window   tokens that the model takes (default 131072); the thresholds of memory compaction follow from it
    config           merged deeply into the generated agent config, last
    args             more arguments for `pool exec`

Its binary is site/bin/pool. Its events carry no ids, so ids are made up in order. It refuses to wait for a browser login.
"""

from __future__ import annotations

import json
from collections import deque

from boxstrap.runner.agents import End, Event, Launch, UnusableError, json_lines, merged, options_of, private_file
from boxstrap.runner.layout import RuntimePaths, SessionPaths
from boxstrap.runner.wire import Kind, Model, Outcome, Request

CONTEXT_WINDOW = 131072
TOOLS = (
    "todo_action read edit write get_diagnostics question shell shell_list shell_tail shell_status shell_kill shell_send "
    "shell_wait skill subagent switch_mode list_secrets exit"
)
GAVE_UP = 4


def launch(request: Request, session: SessionPaths, runtime: RuntimePaths) -> Launch:
    """Write the prompt and the config, and start `pool exec`."""
    model, options = options_of(request, dialects=("chat",), context_window=int, config=dict, args=list)
    window = int(options.get("context_window", CONTEXT_WINDOW))
    config = merged(config_of(model, window), options.get("config", {}))
    argv = [f"{runtime.site}/bin/pool", "exec", "-o", "json", "--sandbox", "disabled", "--unsafe-auto-allow"]
    argv += ["--agent-config-file", private_file(session, "pool.json", json.dumps(config, ensure_ascii=False))]
    argv += ["-f", private_file(session, "prompt", request.prompt), *map(str, options.get("args", []))]
    # Any key keeps pool from starting its login; the model's own credentials are not its business.
    return Launch(argv=argv, env={"POOLSIDE_API_KEY": "unused"}, parser=Events())


def config_of(model: Model, window: int) -> dict[str, object]:
    """Return the whole agent config: pool merges a config file with nothing, so every default of its own is here."""
    compact = {"TriggerCompressionTokenCount": window * 8 // 10, "MaxSummarizeTokenCount": window * 7 // 10}
    # Token ids and log probabilities come only with replies that are not streamed.
    provider = {"base_url": model.url, "api_key": "unused", "model_id": model.name, "use_streaming": False}
    return {
        "max_steps": 0,
        "enabled_tools": TOOLS.split(),
        "http_timeout": "5m0s",
        "enable_no_tool_call_retry": False,
        "enable_truncation_recovery": True,
        "enable_multi_tool_calls": True,
        "enable_tool_call_loop_detection": True,
        "enable_todo_reminders": True,
        "parallel_tool_calls": {"tools": ["subagent"]},
        "tools": {
            "edit": {"fuzzy_match_threshold": 0.05},
            "read": {"max_lines": 500, "line_num_separator": "|◊|"},
            "write": {"line_num_separator": "|◊|"},
            "shell": {"foreground_timeout": "120s"},
        },
        "model": {
            "provider": {"openai": provider},
            "prompt": {"hidden_tool_names": ["exit"]},
            "max_completion_retries": 2,
            "max_completion_retries_transient": 3,
            "exit_tool_on_stop": True,
            "streaming_events_interval": "100ms",
        },
        "memory": {"compact": {**compact, "MinRetainedSteps": 5}},
    }


class Events:
    """Its stdout, one JSON object a line. Results come in the order of the calls."""

    def __init__(self) -> None:
        self._open: deque[tuple[str, str]] = deque()
        self._calls = 0
        self._thought = self._error = ""

    def feed(self, line: bytes) -> list[Event]:
        """Turn one event into evidence."""
        event = json_lines.read(line)
        kind = str(event.get("type") or ("error" if "error" in event else ""))
        text = json_lines.text_of(event.get("message" if kind == "assistantMessage" else kind, ""))
        if kind == "reasoning":
            self._thought = text
            return [json_lines.reasoning(text)]
        if kind in {"thought", "assistantMessage"}:  # a thought repeats the reasoning before it, or is an older version's text
            return [] if not text.strip() or (kind == "thought" and text == self._thought) else [json_lines.message(text)]
        if kind == "toolCall":
            self._calls += 1
            self._open.append((f"call_{self._calls:04d}", str(event.get("name", ""))))
            return [json_lines.call(*self._open[-1], event.get("args", {}))]
        if kind == "toolCallResult" and self._open:
            found = next((event[key] for key in ("err", "result", "entries") if key in event), "")
            output = "\n".join(map(str, found)) if isinstance(found, list) else json_lines.text_of(found)
            return [json_lines.result(*self._open.popleft(), output, "failed" if "err" in event else "completed")]
        if kind == "error":
            self._error = text
            return [(Kind.LOG, {"name": "error", "text": text})]
        if kind == "oauth_url":
            raise UnusableError("pool wants a browser login: it does not take the model's endpoint for a standalone one")
        return json_lines.unknown(line)

    def finish(self, exit_code: int | None) -> End:
        """Close the calls that were never answered, and read the exit code: 4 says that the task could not be done."""
        left = [json_lines.result(*call, "", "incomplete") for call in self._open]
        if exit_code == GAVE_UP:
            return End(events=left, outcome=Outcome.GAVE_UP, detail=self._error or "pool says that it could not do it")
        return End(events=left, outcome=Outcome.AGENT_FAILED if exit_code else None, detail=self._error)
