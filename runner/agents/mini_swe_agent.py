# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""mini-swe-agent's own loop, shell and prompts (its mini.yaml), with a model client of ours instead of litellm.

Options of a request (all optional):

    config            merged deeply into mini.yaml: agent, environment, model
    model_parameters  what goes into every model call as it is: temperature, top_p, max_tokens, …

It refuses to make the repository's .env or a global configuration its own.
"""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any, NoReturn

from boxstrap.runner.agents import Launch, driver, json_lines, merged, options_of
from boxstrap.runner.agents.event_writer import EventWriter
from boxstrap.runner.layout import RuntimePaths, SessionPaths
from boxstrap.runner.wire import Outcome, Request

TERMS: Any = {"dialects": ("chat",), "config": dict, "model_parameters": dict}


def launch(request: Request, session: SessionPaths, runtime: RuntimePaths) -> Launch:
    """Start main() below in the published interpreter."""
    del session
    options_of(request, **TERMS)
    return driver.start(request, runtime, __name__)


def main() -> NoReturn:
    """Run the session's request. Never returns."""
    driver.run(solve)


def solve(request: Request, events: EventWriter) -> tuple[Outcome, str]:
    """Run mini-swe-agent's loop to its end. Everything of its payload is imported here, where it is."""
    os.environ["MSWEA_SILENT_STARTUP"] = "1"
    from minisweagent.agents.default import DefaultAgent  # noqa: PLC0415
    from minisweagent.config import builtin_config_dir, get_config_from_spec  # noqa: PLC0415
    from minisweagent.environments.local import LocalEnvironment  # noqa: PLC0415

    from boxstrap.runner.agents.model_endpoint import ModelEndpoint  # noqa: PLC0415

    del os.environ["MSWEA_SILENT_STARTUP"]
    wanted, options = options_of(request, **TERMS)
    config: Any = merged(get_config_from_spec(builtin_config_dir / "mini.yaml"), options.get("config", {}))
    model = Model(ModelEndpoint(wanted), options.get("model_parameters", {}), config["model"], events)
    agent = DefaultAgent(model, LocalEnvironment(cwd=request.workdir, **config["environment"]), **config["agent"])
    said: dict[str, str] = {}
    try:
        said = agent.run(request.prompt)
    finally:  # the command that submits gets no observation
        submitted = said.get("exit_status") == "Submitted"
        model.close("completed" if submitted else "incomplete", said.get("submission", ""))
    return Outcome.COMPLETED if submitted else Outcome.GAVE_UP, said.get("exit_status", "")


class Model:
    """What mini-swe-agent calls a model: it asks, and records what was said, called and answered."""

    def __init__(self, endpoint: Any, parameters: dict[str, Any], config: dict[str, Any], events: EventWriter) -> None:
        self.config, self._parameters, self._events, self._endpoint = config, parameters, events, endpoint
        self._loop = asyncio.new_event_loop()
        self._open: dict[str, str] = {}

    def query(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Ask the model; a reply that calls nothing, or not rightly, is a FormatError, which goes back to it."""
        from minisweagent.models.utils.actions_toolcall import BASH_TOOL, parse_toolcall_actions  # noqa: PLC0415

        self.close("failed", "refused by the agent")
        said = [{key: value for key, value in message.items() if key != "extra"} for message in messages]
        body = {"model": self._endpoint.name, "messages": said, "tools": [BASH_TOOL], **self._parameters}
        choice = self._loop.run_until_complete(self._endpoint.post(body))["choices"][0]
        message, calls = choice["message"], choice["message"].get("tool_calls") or []
        if thought := message.get("reasoning_content") or message.get("reasoning"):
            self._events.emit(*json_lines.reasoning(thought))
        if message.get("content"):
            self._events.emit(*json_lines.message(json_lines.text_of(message["content"])))
        for call in calls:
            self._open[call["id"]] = name = call["function"]["name"]
            arguments = json_lines.read(call["function"]["arguments"]) or {"unread": call["function"]["arguments"]}
            self._events.emit(*json_lines.call(call["id"], name, arguments))
        asked = [SimpleNamespace(id=call["id"], function=SimpleNamespace(**call["function"])) for call in calls]
        terms, template = {"finish_reason": choice.get("finish_reason")}, self.config["format_error_template"]
        actions = parse_toolcall_actions(asked, format_error_template=template, template_kwargs=terms)
        return {**message, "extra": {"actions": actions, "cost": 0.0}}

    def format_observation_messages(self, message: dict[str, Any], outputs: list[Any], terms: Any) -> list[dict[str, Any]]:
        """Show the model what its commands printed."""
        from minisweagent.models.utils.actions_toolcall import format_toolcall_observation_messages  # noqa: PLC0415

        actions, template = message["extra"]["actions"], self.config["observation_template"]
        shown: list[dict[str, Any]] = format_toolcall_observation_messages(
            actions=actions, outputs=outputs, observation_template=template, template_vars=terms
        )
        for each in shown:
            done, call_id = each["extra"], each["tool_call_id"]
            status = "failed" if done["returncode"] else "completed"
            self._events.emit(*json_lines.result(call_id, self._open.pop(call_id, "bash"), done["raw_output"], status))
        return shown

    def close(self, status: str, output: str) -> None:
        """Say what became of the calls that nobody answered."""
        while self._open:
            self._events.emit(*json_lines.result(*self._open.popitem(), output, status))

    def format_message(self, **message: Any) -> dict[str, Any]:
        """Leave a message as it is."""
        return message

    def serialize(self, **_: Any) -> dict[str, Any]:
        """Add nothing: the evidence is the trajectory."""
        return {}

    get_template_vars = serialize
