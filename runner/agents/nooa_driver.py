# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Runs one request with NOOA's BenchAgent, inside the published interpreter, with the workdir as its current folder.

It enters the agent where nothing is lost (`_solve_task`, not the harness entry that turns every exception into success: false),
gives it our model client, and reports through the event pipe. It refuses to end without a result line.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn
from urllib.parse import urlsplit

from boxstrap.runner.agents import driver, nooa_entry
from boxstrap.runner.agents.event_writer import EventWriter, clip
from boxstrap.runner.agents.nooa import check
from boxstrap.runner.agents.nooa_isolation import cut_off
from boxstrap.runner.environment import SESSION_DIR
from boxstrap.runner.layout import SessionPaths
from boxstrap.runner.wire import Kind, Outcome, Request

TERM_BOUND_S = 1.5
"""From SIGTERM to the end, also when a cell blocks the event loop."""
CLOSE_BOUND_S = 1.0


@dataclass(frozen=True)
class End:
    """How it ended: the outcome word, one sentence, and what came of it."""

    outcome: Outcome
    detail: str
    result: Mapping[str, object] | None = None


class Run:
    """One request, from import to result."""

    def __init__(
        self, request: Request, events: EventWriter, *, session: str = "", wait: Callable[[], Request] | None = None
    ) -> None:
        from boxstrap.runner.agents.nooa_hooks import Recorder  # noqa: PLC0415 (beside its only use)

        self._request = request
        self._wait = wait or (lambda: request)
        self._events = events
        self._recorder = Recorder(events)
        self._jar = SessionPaths(session).resources_cookies if session else ""
        self._tools: Any = None
        self._task: asyncio.Task[End] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        signal.signal(signal.SIGTERM, self._on_term)

    def solve(self) -> End:
        """Import, build, solve. Never raises."""
        try:
            with cut_off(), self._phase("import"):
                agent_class = self._import()
            self._request = self._wait()
            with cut_off(), self._phase("construct"):
                agent, endpoint = self._construct(agent_class)
        except Exception as error:  # noqa: BLE001
            # Broad on purpose: whatever a payload raises while it is imported is a result, not our crash.
            return End(Outcome.SETUP_FAILED, f"the agent could not be built: {_name(error)}", {"causes": causes(error)})
        return asyncio.run(self._session(agent, endpoint))  # it leaves by finish(): a worker thread may hold up asyncio's end

    def finish(self, end: End) -> NoReturn:
        """Send what is open and the result, and leave at once: threads and atexit of agent code have no say."""
        self._recorder.finish()
        self._events.result(end.outcome.value, end.detail, end.result)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0 if end.outcome is Outcome.COMPLETED else 1)

    def _import(self) -> Any:
        importlib.import_module("boxstrap.runner.agents.nooa_model")  # now and not when it is built: the prompt may be awaited
        found = nooa_entry.agent_class_of(self._request)
        if "invocation" in self._request.options:
            nooa_entry.ask_of(self._request)
        self._events.emit(Kind.LOG, {"name": "agent", "version": importlib.metadata.version("nooa")})
        return found

    def _construct(self, agent_class: Any) -> tuple[Any, Any]:
        from nooa.unifiedllm import ensure_loaded  # noqa: PLC0415 (only now is NOOA cut off)

        from boxstrap.runner.agents.model_endpoint import ModelEndpoint  # noqa: PLC0415 (httpx is the payload's)
        from boxstrap.runner.agents.nooa_model import ChatModel, ResponsesModel  # noqa: PLC0415 (the same)

        self._ask = nooa_entry.ask_of(self._request)
        ensure_loaded()  # the model registry reads its files once: now, while there are none
        model = self._request.model
        assert model is not None  # noqa: S101 (check() saw to it)
        endpoint = ModelEndpoint(model, owner=lambda: self._recorder.invocation, on_reply=self._on_reply)
        client = ResponsesModel if model.api == "responses" else ChatModel
        if self._request.tool_accesses:
            from boxstrap.runner.agents.nooa_tools import ResourceTools  # noqa: PLC0415 (jsonschema is the payload's)

            self._tools = ResourceTools(
                self._request.tool_accesses,
                self._events,
                parents=self._recorder.parents,
                jar=self._jar,
                gateway="{0.scheme}://{0.netloc}".format(urlsplit(model.url)) if model.upstream == "relay" else "",
                fail=self._on_resource_failure,
            )
            agent_class = self._tools.extend(agent_class)
        kwargs = nooa_entry.init_kwargs(self._request)
        agent = agent_class(llm=client(endpoint, self._request.options), **kwargs)
        if self._tools is not None:
            self._tools.check(agent)
        if getattr(sys.modules.get("nooa.tracing"), "_provider", None) is not None:
            raise RuntimeError("NOOA's tracing turned itself on: prompts would leave the session")
        nooa_entry.prepare(agent, self._request)
        return agent, endpoint

    async def _session(self, agent: Any, endpoint: Any) -> NoReturn:
        from nooa.runtime.hooks import set_hooks  # noqa: PLC0415 (the payload's)

        self._loop = asyncio.get_running_loop()
        set_hooks(self._recorder)  # after constructing, which may install its own
        agent.event_manager.on("*", self._recorder.on_event)
        self._task = self._loop.create_task(self._solve(agent, endpoint))
        end = End(Outcome.AGENT_FAILED, "")
        try:
            end = await self._task
        except asyncio.CancelledError:
            end = End(Outcome.CANCELLED, "asked to stop by SIGTERM")
        except BaseException:
            if self._without_resource() is None:
                raise
        end = self._without_resource() or end
        with contextlib.suppress(Exception):
            await asyncio.wait_for(agent.shell.close(), CLOSE_BOUND_S)
        self.finish(end)

    async def _solve(self, agent: Any, endpoint: Any) -> End:
        from nooa.errors import GenerationError  # noqa: PLC0415 (the payload's)

        from boxstrap.runner.agents.model_endpoint import ModelFailedError, PolicyBudgetExhaustedError  # noqa: PLC0415

        if unseen := nooa_entry.unseen(self._request):
            why = f"{unseen} items of the input besides the latest message of the user"
            self._events.emit(Kind.GAP, {"code": "input_not_shown", "detail": why})
        try:
            with self._phase("solve"):
                answer = await self._ask(agent)
        except PolicyBudgetExhaustedError as error:
            return End(Outcome.POLICY_BUDGET_EXHAUSTED, str(error))
        except ModelFailedError as error:
            return End(Outcome.MODEL_FAILED, str(error), {"causes": causes(error)})
        except Exception as error:  # noqa: BLE001
            # Broad on purpose: whatever the agent raises is its result.
            if endpoint.last_problem is not None:
                return End(Outcome.MODEL_FAILED, endpoint.last_problem.text, {"causes": causes(error)})
            result: dict[str, object] = {"causes": causes(error)}
            if isinstance(error, GenerationError):  # the model answered, and its answers came to nothing: gradable
                return End(Outcome.GAVE_UP, _name(error), {**result, "termination_reason": "invalid_policy_output"})
            return End(Outcome.AGENT_FAILED, _name(error), result)
        if endpoint.last_problem is not None:
            return End(Outcome.MODEL_FAILED, f"the agent returned, but its last call failed: {endpoint.last_problem.text}")
        return End(Outcome.COMPLETED, "the agent returned a result", self._final(answer))

    def _final(self, answer: Any) -> dict[str, object]:
        """Record the returned value as the last message unless the model wrote it as such; then nobody trains on it."""
        plain = answer.model_dump(mode="json") if hasattr(answer, "model_dump") else answer
        text = plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False, default=str)
        if plain is not None and text != self._recorder.last_text:
            self._events.emit(Kind.MESSAGE, {"role": "assistant", "text": clip(text), "final": True})
            why = "the returned value is no text of the model"
            self._events.emit(Kind.GAP, {"code": "non_trainable_terminal_output", "detail": why})
        fields = plain if isinstance(plain, dict) else {"value": plain}
        return {
            str(key): clip(value if isinstance(value, str) else json.dumps(value, default=str)) for key, value in fields.items()
        }

    def _without_resource(self) -> End | None:
        """Whatever the agent made of it: without a required server there is no result."""
        failure = None if self._tools is None else self._tools.failure
        return None if failure is None else End(Outcome.RESOURCE_FAILED, str(failure))

    def _on_reply(self, reply: Mapping[str, object], seq: int | None) -> None:
        for text in reasoning_in(reply):
            self._events.emit(Kind.REASONING, {"text": clip(text), "model_call_seq": seq})

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._events.emit(Kind.PHASE, {"name": name, "seconds": round(time.monotonic() - started, 6)})

    def _on_resource_failure(self) -> None:
        failed = self._without_resource()
        assert failed is not None  # noqa: S101 (that is why it is called)
        self._end_soon(failed)

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._end_soon(End(Outcome.CANCELLED, "asked to stop by SIGTERM"))

    def _end_soon(self, end: End) -> None:
        """Cancel, and see from another thread that it ends: this one may be in a cell that never yields."""
        bound = 0.0
        if self._task is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
            bound = TERM_BOUND_S
        timer = threading.Timer(bound, self.finish, (end,))
        timer.daemon = True
        timer.start()


class _Warnings(logging.Handler):
    """Python warnings and errors of the agent's libraries, as log events."""

    def __init__(self, events: EventWriter) -> None:
        super().__init__(logging.WARNING)
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        """Write one."""
        data = {"name": "logging", "logger": record.name, "level": record.levelname.lower()}
        self._events.emit(Kind.LOG, {**data, "text": clip(record.getMessage(), 8000)})


def causes(error: BaseException) -> list[str]:
    """Return the chain of an exception, outermost first."""
    chain: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        chain.append(_name(current))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return chain


def _name(error: BaseException) -> str:
    return clip(f"{type(error).__name__}: {error}", 2000)


def reasoning_in(response: object) -> Iterator[str]:
    """Yield the reasoning texts of a reply of either dialect."""
    if not isinstance(response, dict):
        return
    for item in response.get("output") or []:
        if item.get("type") == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            yield "\n".join(str(part.get("text", "")) for part in parts)
    for choice in response.get("choices") or []:
        text = choice["message"].get("reasoning") or choice["message"].get("reasoning_content")
        if text:
            yield str(text)


def main() -> NoReturn:
    """Run the request of the session folder that the environment names. Never returns."""
    session = os.environ.get(SESSION_DIR, "")
    request, events, wait = driver.begin()
    try:
        check(request)
    except ValueError as error:
        events.result(Outcome.SETUP_FAILED, f"the request cannot be run: {_name(error)}", None)
        sys.exit(1)
    logging.getLogger().addHandler(_Warnings(events))
    run = Run(request, events, session=session, wait=wait)
    try:
        end = run.solve()
    except BaseException as error:  # noqa: BLE001
        # Broad on purpose: agent code shares this process, and a session without a result line explains nothing.
        end = End(Outcome.AGENT_FAILED, _name(error), {"causes": causes(error)})
    run.finish(end)
