# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What NOOA does, as evidence: its hooks and its event manager become events.

Names follow NeMo Gym's observability records (tool_call_id, tool_name, invocation_id, started_at, status). It refuses to call a
cell complete that did not say so: on cancellation NOOA calls the after-hook with neither result nor exception, and that cell
is recorded as interrupted.
"""

from __future__ import annotations

import json
import reprlib
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from boxstrap.runner.agents.event_writer import EventWriter, clip
from boxstrap.runner.wire import Kind

_MADE_UP = ("prefill_", "synthetic_", "codeact_inline_")
"""How the ids of tool calls begin that the model did not make."""


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 8000
_SHORT.maxlist = _SHORT.maxdict = _SHORT.maxtuple = _SHORT.maxset = 100


@dataclass
class _Running:
    """Something that was begun and has not ended."""

    data: dict[str, object]
    clock: float
    outer: _Running | None = None
    """What was running in the same context when it began."""


class Recorder:
    """Instrumentation hooks of NOOA, and the handler of one agent's event manager. Each method is called by NOOA."""

    def __init__(self, events: EventWriter) -> None:
        self._events = events
        self._cells: dict[str, _Running] = {}
        self._calls: dict[str, _Running] = {}
        self._invocations: dict[str, str] = {}
        self._asking: ContextVar[str | None] = ContextVar("asking", default=None)
        self._within: ContextVar[_Running | None] = ContextVar("within", default=None)
        self.last_text = ""

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Ignore the hooks that are not evidence."""
        if name.startswith(("before_", "after_", "on_")):
            return lambda **_: None
        raise AttributeError(name)

    def before_agent_call(self, *, method_name: str, call_id: str, parent_call_id: str | None, **_: Any) -> _Running:
        """An agent method begins: an invocation in Gym's words."""
        data: dict[str, object] = {"invocation_id": call_id, "parent_invocation_id": parent_call_id, "method": method_name}
        running = _Running(data, time.monotonic(), self._within.get())
        self._within.set(running)
        return running

    def after_agent_call(self, *, exception: BaseException | None, context: _Running | None, **_: Any) -> None:
        """It ended; what is private to the agent is no invocation, unless it asked a model."""
        if context is None:
            return
        self._within.set(context.outer)
        if not str(context.data["method"]).startswith("_") or context.data["invocation_id"] in self._invocations.values():
            # NOOA knows of no exception but an Exception, and calls this while any other is on its way out.
            cut = isinstance(sys.exception(), BaseException) and not isinstance(sys.exception(), Exception)
            status = "failed" if exception else "interrupted" if cut else "completed"
            seconds = round(time.monotonic() - context.clock, 6)
            self._events.emit(Kind.LOG, {"name": "invocation", **context.data, "status": status, "seconds": seconds})

    def before_generation(self, *, generation_id: str, agent_call_id: str | None = None, **_: Any) -> None:
        """Remember whose generation it is."""
        self._invocations[generation_id] = agent_call_id or generation_id

    def on_messages_built(self, *, generation_id: str, **_: Any) -> None:
        """A model call comes next, in this very context."""
        self._asking.set(self._invocations.get(generation_id, generation_id))

    @property
    def invocation(self) -> str | None:
        """Whose model call is under way in this context."""
        return self._asking.get()

    def parents(self) -> dict[str, object]:
        """Say in whose invocation, cell and tool call this context is."""
        running = self._within.get()
        data = {} if running is None else running.data
        return {
            "invocation_id": data.get("invocation_id"),
            "parent_tool_call_id": data.get("tool_call_id"),
            "parent_execution_id": data.get("execution_id"),
        }

    def before_code_execution(
        self, *, code: str, execution_id: str, generation_id: str | None = None, tool_call_id: str | None = None, **_: Any
    ) -> None:
        """A cell begins. Its code is kept from here: the after-hook gets it rewritten."""
        data: dict[str, object] = {"execution_id": execution_id, "tool_call_id": tool_call_id, "code": clip(code)}
        data |= {"invocation_id": self._invocations.get(generation_id or ""), "started_at": time.time()}
        data["synthetic"] = bool(tool_call_id and tool_call_id.startswith(_MADE_UP))
        self._cells[execution_id] = _Running(data, time.monotonic(), self._within.get())
        self._within.set(self._cells[execution_id])

    def after_code_execution(self, *, execution_id: str, result: Any, exception: BaseException | None, **_: Any) -> None:
        """A cell ended."""
        running = self._cells.pop(execution_id, None)
        if running is None:
            return None
        self._within.set(running.outer)
        if result is None:
            return self._cell(running, "failed" if exception else "interrupted", error=repr(exception) if exception else None)
        error = None if result.error is None else f"{type(result.error).__name__}: {result.error}"
        return self._cell(running, "failed" if error else "completed", result.stdout, result.stderr, error)

    def after_tool_execution(self, *, tool_name: str, result: Any, exception: BaseException | None, **_: Any) -> None:
        """return_result was judged."""
        call = next((key for key, running in self._calls.items() if running.data["tool_name"] == tool_name), None)
        if call is not None:
            output = "Result accepted." if exception is None and result is not None else f"Invalid result: {exception}"
            self._tool_result(call, "failed" if exception else "completed", output)

    def on_event(self, event: Any) -> None:
        """Take one event of the agent's event manager."""
        handler = {
            "ToolCallEvent": self._on_tool_call,
            "PythonOutput": self._on_python_output,
            "TextOnlyReply": self._on_text,
            "LLMCallStart": self._on_model_call,
            "Error": self._on_note,
            "Summary": self._on_note,
            "DebugTrace": self._on_note,
        }.get(type(event).__name__)
        if handler is not None:
            handler(event)

    def finish(self) -> None:
        """Name what was begun and never ended."""
        for key in list(self._cells):
            self._cell(self._cells.pop(key), "interrupted")
        for call in list(self._calls):
            self._tool_result(call, "incomplete", "")

    def _on_tool_call(self, event: Any) -> None:
        if event.tool_call_id.startswith(_MADE_UP):
            return
        data: dict[str, object] = {"tool_call_id": event.tool_call_id, "tool_name": event.name, "started_at": time.time()}
        data["invocation_id"] = event.metadata.get("call_id")
        self._events.emit(Kind.TOOL_CALL, {**data, "arguments": _bounded(event.arguments)})
        self._calls[event.tool_call_id] = _Running(data, time.monotonic())

    def _on_python_output(self, event: Any) -> None:
        if event.tool_call_id in self._calls:
            parts = [event.stdout, event.stderr, event.error, "" if event.value is None else _SHORT.repr(event.value)]
            status = "failed" if str(event.execution_status.value) == "error" else "completed"
            self._tool_result(event.tool_call_id, status, "\n".join(part for part in parts if part))

    def _on_text(self, event: Any) -> None:
        self.last_text = event.content
        self._events.emit(Kind.MESSAGE, {"role": "assistant", "text": clip(event.content), "final": False})

    def _on_model_call(self, _: Any) -> None:
        """No call of the turn before is still running: what has no result yet was refused by NOOA itself."""
        for call in list(self._calls):
            self._tool_result(call, "failed", "refused by the agent")

    def _on_note(self, event: Any) -> None:
        text = getattr(event, "content", None) or repr(event)
        self._events.emit(Kind.LOG, {"name": type(event).__name__, "text": clip(str(text), 8000)})

    def _cell(self, running: _Running, status: str, stdout: str = "", stderr: str = "", error: str | None = None) -> None:
        seconds = round(time.monotonic() - running.clock, 6)
        outcome = {"status": status, "seconds": seconds, "stdout": clip(stdout), "stderr": clip(stderr)}
        self._events.emit(Kind.PYTHON_EXECUTION, {**running.data, **outcome, "error": error and clip(error)})

    def _tool_result(self, call: str, status: str, output: str) -> None:
        running = self._calls.pop(call)
        outcome = {"status": status, "completed_at": time.time(), "seconds": round(time.monotonic() - running.clock, 6)}
        self._events.emit(Kind.TOOL_RESULT, {**running.data, **outcome, "output": clip(output)})


def _bounded(arguments: dict[str, Any]) -> dict[str, object]:
    return {key: clip(value if isinstance(value, str) else json.dumps(value, default=str)) for key, value in arguments.items()}
