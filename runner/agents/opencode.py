# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""OpenCode, the real binary, headless: the prompt comes on stdin, the configuration in one variable.

Options of a request (all optional):

    context_window     tokens that the model takes (default 131072)
    max_output_tokens  tokens that one answer may have (default 16384)
    config             merged deeply into the generated configuration, last

Its binary is site/bin/opencode. It refuses to let OpenCode read the repository's configuration, ask for newer versions, or
fetch anything: what it would install is there, or declared as installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile

from boxstrap.runner.agents import End, Event, Launch, json_lines, merged, options_of, private_file
from boxstrap.runner.layout import RuntimePaths, SessionPaths
from boxstrap.runner.wire import Kind, Model, Outcome, Request

_CLIENTS = {"chat": "@ai-sdk/openai-compatible", "responses": "@ai-sdk/openai"}
"""Both are inside the binary."""
_PLUGIN = "@opencode-ai/plugin"
_ENV = ("OPENCODE_DISABLE_MODELS_FETCH", "OPENCODE_DISABLE_AUTOUPDATE", "OPENCODE_DISABLE_PROJECT_CONFIG")
_QUIET = {"step_start"}


def launch(request: Request, session: SessionPaths, runtime: RuntimePaths) -> Launch:
    """Start one turn. --title keeps it from asking the model for a title, which would count as a call."""
    model, options = options_of(request, dialects=tuple(_CLIENTS), context_window=int, max_output_tokens=int, config=dict)
    limit = {"context": options.get("context_window", 131072), "output": options.get("max_output_tokens", 16384)}
    config = merged(config_of(model, limit), options.get("config", {}))
    _furnish(session, runtime)
    return Launch(
        argv=[f"{runtime.site}/bin/opencode", "run", "--format", "json", "--auto", "--thinking", "--pure", "--title", "task"],
        # Bun unpacks libraries there, and leaves them.
        env={"OPENCODE_CONFIG_CONTENT": json.dumps(config), **dict.fromkeys(_ENV, "1"), "BUN_TMPDIR": session.tmp},
        stdin=private_file(session, "prompt", request.prompt),
        parser=Events(),
    )


def config_of(model: Model, limit: dict[str, int]) -> dict[str, object]:
    """Return the configuration: our endpoint as the only provider, and nothing that reaches out or rewrites what was edited."""
    client = {"baseURL": model.url, "apiKey": "unused", "headers": model.headers, "timeout": int(model.timeout_s * 1000)}
    provider = {"npm": _CLIENTS[model.api], "options": client, "models": {model.name: {"limit": limit}}}
    off = {"autoupdate": False, "share": "disabled", "snapshot": False, "lsp": False, "formatter": False}
    return {"model": f"gym/{model.name}", "enabled_providers": ["gym"], "provider": {"gym": provider}, **off}


def _furnish(session: SessionPaths, runtime: RuntimePaths) -> None:
    """Make HOME look as after what OpenCode would fetch: `npm install` at each start, ripgrep for grep and glob."""
    folder, programs = (os.path.join(session.home, kind, "opencode") for kind in (".config", ".cache"))
    os.makedirs(os.path.join(folder, "node_modules"), mode=0o700, exist_ok=True)
    with open(os.path.join(folder, "package-lock.json"), "w", encoding="ascii") as file:
        json.dump({"packages": {"": {"dependencies": {_PLUGIN: "*"}}}}, file)
    os.makedirs(os.path.join(programs, "bin"), mode=0o700, exist_ok=True)
    if os.path.exists(f"{runtime.site}/bin/rg"):
        os.symlink(f"{runtime.site}/bin/rg", os.path.join(programs, "bin", "rg"))


class Events:
    """Its stdout, one JSON object a line. A tool is told of when it has ended, call and result in one."""

    def __init__(self) -> None:
        self._error = ""
        self._model_failed = False

    def feed(self, line: bytes) -> list[Event]:
        """Turn one event into evidence."""
        event = json_lines.read(line)
        part = event.get("part")
        kind, part = str(event.get("type")), part if isinstance(part, dict) else {}
        text = json_lines.text_of(part.get("text", ""))
        if kind == "text":
            return [json_lines.message(text)] if text.strip() else []
        if kind == "reasoning":
            return [json_lines.reasoning(text)] if text.strip() else []
        if kind == "tool_use" and isinstance(part.get("state"), dict):
            state, who = part["state"], (str(part.get("callID", "")), str(part.get("tool", "")))
            status = {"completed": "completed", "error": "failed"}.get(str(state.get("status")), "incomplete")
            output = json_lines.text_of(state.get("output") or state.get("error") or "")
            return [json_lines.call(*who, state.get("input", {})), json_lines.result(*who, output, status)]
        if kind == "step_finish":
            return [(Kind.LOG, {"name": "step", "reason": part.get("reason"), "tokens": part.get("tokens")})]
        if kind == "error":
            return [(Kind.LOG, {"name": "error", "text": self._failed(event.get("error"))})]
        return [] if kind in _QUIET else json_lines.unknown(line)

    def _failed(self, error: object) -> str:
        """Remember what went wrong, and whether the model did."""
        said = error if isinstance(error, dict) else {}
        data = said.get("data")
        text = json_lines.text_of(data.get("message", error) if isinstance(data, dict) else error)
        self._model_failed = said.get("name") in {"APIError", "ProviderAuthError"}
        self._error = f"{said.get('name', 'error')}: {text}"
        return self._error

    def finish(self, exit_code: int | None) -> End:
        """Tell a failure of the model from one of its own, and take its empty folder out of the task's temporary folder."""
        with contextlib.suppress(OSError):
            os.rmdir(os.path.join(tempfile.gettempdir(), "opencode"))
        if not exit_code:
            return End(detail=self._error)
        return End(outcome=Outcome.MODEL_FAILED if self._model_failed else Outcome.AGENT_FAILED, detail=self._error)
