# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""One session: open, invoke, close.

    async with open_session(sandbox, spec) as session:
        result = await session.invoke(spec.request(prompt))

Closing always runs: it stops the agent, collects to the end, removes the session's folder, and leaves the sandbox
running. It refuses to start an agent twice: the claim in the sandbox decides, also across a restart of the controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import StrEnum
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from boxstrap.controller import push, tools
from boxstrap.controller.box import STOP_MARGIN_S, BoxSession
from boxstrap.controller.cancelling import carry_through
from boxstrap.controller.collect import Collector
from boxstrap.controller.credentials import refuse_credentials
from boxstrap.controller.errors import (
    BoxstrapError,
    CleanupUnconfirmed,
    EvidenceError,
    SandboxLost,
    SessionConflict,
    SessionStateError,
    SetupFailed,
    UsageError,
)
from boxstrap.controller.fetch import fetch_artifacts
from boxstrap.controller.phases import Phases
from boxstrap.controller.relay import ModelRelay
from boxstrap.controller.sandbox import Sandbox
from boxstrap.controller.sink import Sink
from boxstrap.controller.spec import RELAY, Result, SessionSpec
from boxstrap.controller.tool_jars import ToolJars
from boxstrap.runner.layout import RuntimePaths, SessionPaths, default_runtime_root, default_session_root
from boxstrap.runner.wire import (
    SESSION_ID,
    STOPPED_CLAIM,
    WARM_MAX_S,
    Event,
    Installed,
    Kind,
    Outcome,
    Receipt,
    Request,
    Tail,
    outcome_of,
    prewarm_of,
    request_digest,
)

__all__ = ["Result", "Session", "SessionSpec", "open_session"]

STOP_AGAIN_S = 1.0
"""How long an activation may take to notice a stop before it is stopped again: it may not have claimed the session yet."""
RESULT = "result.json"
JARS = "resources_cookies.json"
ARTIFACTS = "artifacts"


class State(StrEnum):
    """Where a Session stands. It goes forward only, but for an open that failed and a close that is repeated."""

    NEW = "not open"
    OPENING = "opening"
    OPEN = "open already"
    CLOSING = "closing"
    CLOSED = "closed"


_RESULT = TypeAdapter(Result)


class Session:
    """An open session. Made by `open_session`; `invoke` once (identical repeats share it), then `close`."""

    def __init__(
        self,
        sandbox: Sandbox,
        spec: SessionSpec,
        *,
        sink: Sink | None = None,
        on_event: Callable[[Event], None] | None = None,
        on_phase: Callable[[str, float], None] | None = None,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        if not re.fullmatch(SESSION_ID, spec.session_id):
            raise UsageError(f"Found session id {spec.session_id!r}, needed {SESSION_ID}.", remedy="Choose another.")
        if spec.upstream not in {"direct", RELAY}:
            raise UsageError(f"Found upstream {spec.upstream!r}, needed direct or {RELAY}.", remedy="Choose one of them.")
        spec.budgets.check()
        tools.check(spec.tool_accesses, agent=spec.agent)
        self._sandbox = sandbox
        self._sink = sink
        self.spec = spec
        roots = getattr(sandbox, "roots", None)
        roots = roots(spec.agent) if callable(roots) else (default_runtime_root(spec.agent), default_session_root(spec.agent))
        self._runtime_root = spec.runtime_root or roots[0]
        self._session_root = spec.session_root or roots[1]
        self.paths = SessionPaths.of(self._session_root, spec.session_id)
        self.phases = Phases(on_phase, on_note)
        self._on_event = on_event
        self.collector = Collector(spec.out, self._deliver)
        self.runtime: RuntimePaths | None = None
        self.installed: Installed | None = None
        self._request: Request | None = None
        self._warming: asyncio.Task[None] | None = None
        self._running: asyncio.Task[Result] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._state = State.NEW
        self._box: BoxSession | None = None
        self._artifacts = 0
        self._cookies: dict[str, str] = {}
        self._jars = ToolJars(spec.tool_accesses, spec.out / JARS) if spec.upstream == RELAY else None
        self._foreign = False
        """Whether the session in the box turned out to be another request's: closing must not stop it."""
        self.result: Result | None = None

    async def open(self) -> None:
        """Check the box and make sure that the agent's runtime is in it. May be repeated when it failed.

        Raises:
            PreflightError, InstallError, ArtifactError, SandboxLost: see push.ensure_runtime.
            SessionStateError: it was called before, or after close.
        """
        if self._state is not State.NEW:
            raise SessionStateError(f"The session is {self._state}.", remedy="Call open once, before anything else.")
        spec = self.spec
        want = push.Want(
            agent=spec.agent,
            variant=spec.variant,
            runtime_root=self._runtime_root,
            session_root=self._session_root,
            workdir=spec.workdir,
            urls=[
                *([_origin(spec.model.url)] if spec.model and spec.upstream != RELAY else []),
                *(tools.origins(spec.tool_accesses, required=True) if spec.upstream != RELAY else []),
            ],
            loopback_ok=spec.loopback_ok or bool(getattr(self._sandbox, "shares_host_network", False)),
            interpreter=spec.interpreter,
            program=spec.program,
            user=spec.user,
        )
        self._state = State.OPENING
        try:
            if spec.upstream == RELAY:
                await tools.probe_from_here(spec.tool_accesses, self.phases)
            self.runtime, self.installed = await push.ensure_runtime(self._sandbox, want, self.phases)
            if spec.upstream != RELAY:
                await tools.probe_optional(self._sandbox, self.runtime.archive, want, spec.tool_accesses, self.phases)
            self._state = State.OPEN
        finally:
            if self._state is State.OPENING:
                self._state = State.NEW
        self._box = BoxSession(
            self._sandbox, self.paths, self.runtime.archive, self.collector, user=spec.user, note=self.phases.note
        )
        if spec.prewarm:
            self._warming = asyncio.create_task(self._prewarm(self._box))

    async def _prewarm(self, box: BoxSession) -> None:
        """Start early what needs no prompt. It only makes things fast: whatever goes wrong, `invoke` comes to it too."""
        request = prewarm_of(self.spec.request(""))
        with contextlib.suppress(BoxstrapError, OSError):
            if not self.spec.allow_credentials:
                refuse_credentials(request)
            await box.prewarm(request, self.spec.out / "prewarm.json", bound_s=self._bound_s(request) + WARM_MAX_S)

    async def _stop_warming(self) -> None:
        """What has not been started by now is not worth waiting for; what was, is in the box."""
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.gather(self._warming, return_exceptions=True)

    async def invoke(self, request: Request) -> Result:
        """Run the agent once and return how it ended; an identical request joins the activation that runs or ran.

        Raises:
            SessionConflict: another request holds this session.
            SessionStateError: the session is not open.
        """
        if self._state is not State.OPEN or self._box is None:
            raise SessionStateError(f"The session is {self._state}.", remedy="Call open before invoke, and close after it.")
        if self._running is None:
            if not self.spec.allow_credentials:
                refuse_credentials(request)
            self._request = request
            self._running = asyncio.create_task(self._activate(request, self._box))
        elif request != self._request:
            raise SessionConflict("Another request holds this session.", remedy="Open a session with another id.")
        return await asyncio.shield(self._running)

    async def close(self) -> Result | None:
        """Stop the agent, collect to the end, remove the session's folder. Safe to repeat until it succeeds.

        A cancelled caller waits for it all the same: it is bounded by `budgets.stop_s`, and leaving would leave the agent.

        Returns:
            The final result, or None when nothing was ever invoked.

        Raises:
            SandboxLost: the sandbox stopped answering; what was collected is on the host's disk.
            CleanupUnconfirmed: processes of the session are left in the sandbox.
            SessionStateError: open is still at work: cancel it first.
        """
        if self._state is State.OPENING:
            raise SessionStateError("The session is opening.", remedy="Cancel open, or wait for it, and then close.")
        if self._state is not State.CLOSED:
            self._state = State.CLOSING
            if self._closing is None or self._closing.done():
                self._closing = asyncio.create_task(self._close())
            await carry_through(self._closing)
        return self.result

    async def _close(self) -> None:
        box, running = self._box, self._running
        await self._stop_warming()
        if box is not None and running is None and self._warming is not None:
            with self.phases.step("close"):
                await box.cool_down(bound_s=float(self.spec.budgets.stop_s), keep=self.spec.keep)
        if box is not None and running is not None and not (running.done() and self._foreign):
            with self.phases.step("close"):
                stop_s = float(self.spec.budgets.stop_s)
                while not running.done():
                    with contextlib.suppress(SandboxLost, CleanupUnconfirmed):  # the activation finds out for itself
                        await box.stop(bound_s=stop_s)
                    await asyncio.wait({running}, timeout=STOP_AGAIN_S)
                await box.release()
                lost = self.result is not None and self.result.outcome is Outcome.SANDBOX_LOST
                with contextlib.suppress(SandboxLost) if lost else contextlib.nullcontext():
                    if lost:
                        await self._collect_rest(box, stop_s)
                    await self._fetch(box)
                    await box.remove(bound_s=stop_s, keep=self.spec.keep)
        self._state = State.CLOSED
        self.collector.close()

    async def _fetch(self, box: BoxSession) -> None:
        """Bring the artifacts out; they are what would be lost with the session's folder."""
        folder, remote = self.spec.out / ARTIFACTS, self.paths.artifacts
        self._artifacts = await box.steadily(lambda: fetch_artifacts(self._sandbox, remote, folder, self.collector))
        if self.result is not None and self.result.artifacts != self._artifacts:
            self._conclude(self.result.outcome, self.result.detail, self.result.receipt)

    async def _activate(self, request: Request, box: BoxSession) -> Result:
        digest = request_digest(request)
        earlier = self._earlier(digest)
        if earlier is not None:
            return earlier
        try:
            tail = await self._run_to_end(request, digest, box)
        except SessionConflict:
            self._foreign = True
            await box.release()
            raise
        except (SandboxLost, SetupFailed, EvidenceError, CleanupUnconfirmed) as error:
            await box.salvage(self.spec.out / ".salvaged")
            self.collector.end(None)
            return self._conclude(error.outcome, str(error), None)
        if tail.claim == STOPPED_CLAIM:
            return self._conclude(Outcome.CANCELLED, "it was stopped before it began", None)
        return await self._judge(tail.receipt, digest, box)

    async def _judge(self, receipt: Receipt | None, digest: str, box: BoxSession) -> Result:
        """Conclude from a receipt that is this session's; one that is not is named, and nobody's word for anything."""
        if receipt is not None and (receipt.session_id, receipt.request_digest) != (self.spec.session_id, digest):
            self.collector.note(
                "foreign_receipt", f"session {receipt.session_id[:128]!r}, request {receipt.request_digest[:16]!r}"
            )
            receipt = None
        self.collector.end(receipt)
        accesses, jar = self.spec.tool_accesses, self.paths.resources_cookies
        if self._jars is not None:
            self._cookies = self._jars.cookies()
        elif accesses:
            self._cookies = await tools.final_cookies(self._sandbox, jar, accesses, user=self.spec.user)
        with contextlib.suppress(SandboxLost):  # close tries again, before anything is removed
            await self._fetch(box)
        if receipt is None:
            return self._conclude(Outcome.SANDBOX_LOST, "the supervisor is gone and left no receipt of this session", None)
        return self._conclude(outcome_of(receipt), receipt.detail, receipt)

    async def _run_to_end(self, request: Request, digest: str, box: BoxSession) -> Tail:
        await self._stop_warming()
        bound_s = self._bound_s(request)
        claim = await box.claim()
        launched = not claim
        async with self._receiving(box, ours=claim in {"", digest}):
            if launched:
                await box.send(request, self.spec.out / "request.json")
                if self._state is State.CLOSING:
                    return Tail(start=0, next=0, size=0, chunk="", state="absent", claim=STOPPED_CLAIM)
                box.launch(bound_s=bound_s)
            async with self._relaying():
                return await box.follow(digest, bound_s=bound_s, launched=launched, stop_s=float(self.spec.budgets.stop_s))

    @asynccontextmanager
    async def _receiving(self, box: BoxSession, *, ours: bool) -> AsyncIterator[None]:
        """Let the box push its evidence, where there is a sink; another request's session is not told of it."""
        if self._sink is None or not ours:
            yield
            return
        inbox = self._sink.register()
        try:
            await box.receive(inbox, self.spec.out / ".sink.json")
            yield
        finally:
            self._sink.unregister(inbox)

    @staticmethod
    def _bound_s(request: Request) -> float:
        return request.deadline_s + request.grace_s + STOP_MARGIN_S

    @asynccontextmanager
    async def _relaying(self) -> AsyncIterator[None]:
        """Make the box's model calls for as long as the session is followed, where that is asked for."""
        spec = self.spec
        if spec.model is None or spec.upstream != RELAY or self.runtime is None:
            yield
            return
        relay = ModelRelay(
            *(self._sandbox, self.paths, self.runtime.archive, spec.model),
            max_calls=spec.max_policy_calls,
            user=spec.user,
            tools=self._jars,
        )
        running = asyncio.create_task(relay.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _collect_rest(self, box: BoxSession, stop_s: float) -> None:
        """A box that was lost may be back: what was written meanwhile is evidence, and the outcome stays what it was."""
        assert self._request is not None  # noqa: S101 (held by invoke)
        if self.result is None or self.result.receipt is not None:
            return
        detail = self.result.detail
        with contextlib.suppress(EvidenceError, CleanupUnconfirmed, SetupFailed):
            tail = await box.catch_up(stop_s=stop_s)
            if tail.claim != STOPPED_CLAIM:
                await self._judge(tail.receipt, request_digest(self._request), box)
                self._conclude(Outcome.SANDBOX_LOST, detail, self.result.receipt)

    def _earlier(self, digest: str) -> Result | None:
        """Return the result that an earlier controller wrote for this very request."""
        with contextlib.suppress(OSError, ValidationError):
            result = _RESULT.validate_json((self.spec.out / RESULT).read_bytes())
            if result.receipt is not None and result.receipt.request_digest == digest:
                self.result = result
                return result
        return None

    def _conclude(self, outcome: Outcome, detail: str, receipt: Receipt | None) -> Result:
        self.result = Result(
            outcome=outcome,
            detail=detail,
            receipt=receipt,
            evidence=self.collector.path,
            events=self.collector.events,
            gaps=self.collector.gaps,
            artifacts=self._artifacts,
            resources_cookies=self._cookies,
            seconds=dict(self.phases.seconds),
        )
        part = self.spec.out / f".{RESULT}.part"
        part.write_bytes(_RESULT.dump_json(self.result, indent=1) + b"\n")
        part.replace(self.spec.out / RESULT)
        return self.result

    def _deliver(self, event: Event) -> None:
        if event.kind == Kind.PHASE and isinstance(event.data.get("name"), str):
            seconds = event.data.get("seconds")
            self.phases.add(f"agent {event.data['name']}"[:60], float(seconds) if isinstance(seconds, (int, float)) else 0.0)
        if self._on_event is not None:
            self._on_event(event)


@asynccontextmanager
async def open_session(
    sandbox: Sandbox,
    spec: SessionSpec,
    *,
    sink: Sink | None = None,
    on_event: Callable[[Event], None] | None = None,
    on_phase: Callable[[str, float], None] | None = None,
    on_note: Callable[[str], None] | None = None,
) -> AsyncIterator[Session]:
    """Open a session, and close it whatever happens. With a `sink`, a box that reaches it pushes its evidence there.

    Raises:
        BoxstrapError: as Session.open, Session.invoke and Session.close do.
    """
    session = Session(sandbox, spec, sink=sink, on_event=on_event, on_phase=on_phase, on_note=on_note)
    try:
        await session.open()
        yield session
    finally:
        await session.close()


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
