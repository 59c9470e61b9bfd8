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
import shlex
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from boxstrap.controller import push
from boxstrap.controller.budgets import Budgets
from boxstrap.controller.collect import Collector, Gap
from boxstrap.controller.credentials import refuse_credentials
from boxstrap.controller.errors import (
    EvidenceError,
    SandboxLost,
    SessionConflict,
    SessionStateError,
    SetupFailed,
    UsageError,
)
from boxstrap.controller.phases import Phases
from boxstrap.controller.sandbox import ExecResult, Sandbox
from boxstrap.runner.layout import RuntimePaths, SessionPaths, default_runtime_root, default_session_root
from boxstrap.runner.wire import (
    SESSION_ID,
    Answer,
    Event,
    Installed,
    Kind,
    Model,
    Outcome,
    Receipt,
    Request,
    Tail,
    outcome_of,
    request_digest,
    to_json,
)

TAIL_WAIT_S = 20.0
TAIL_MARGIN_S = 30.0
ABSENT_BOUND_S = 5.0
"""How long a launched session may stay unclaimed before the launch is repeated in the foreground, to hear why."""
TRANSPORT_TRIES = 4
STOP_MARGIN_S = 60.0
HELD_BOUND_S = 5.0
RESULT = "result.json"


@dataclass(frozen=True, kw_only=True)
class SessionSpec:
    """What a session is: which agent, where, with which budgets, and where the host keeps its evidence.

    `out` is the host's folder for this session; the same `session_id` and `out` attach after a restart. `loopback_ok`
    says that the box shares the network in which a loopback URL is meant. `allow_credentials` lets a request carry what
    looks like a provider's key.
    """

    session_id: str
    agent: str
    workdir: str
    out: Path
    model: Model | None = None
    variant: str = "lean"
    runtime_root: str = ""
    session_root: str = ""
    interpreter: Path | None = None
    budgets: Budgets = field(default_factory=Budgets)
    loopback_ok: bool = False
    allow_credentials: bool = False
    user: str | int | None = None
    activation: str = ""
    env: dict[str, str] = field(default_factory=dict)
    argv: list[str] = field(default_factory=list)
    options: dict[str, object] = field(default_factory=dict)
    max_policy_calls: int | None = None

    def request(self, prompt: str) -> Request:
        """Make the request that `invoke` takes."""
        return Request(
            session_id=self.session_id,
            agent=self.agent,
            workdir=self.workdir,
            prompt=prompt,
            model=self.model,
            deadline_s=float(self.budgets.worker_s),
            activation=self.activation,
            env=self.env,
            argv=self.argv,
            options=self.options,
            max_policy_calls=self.max_policy_calls,
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """How an invocation ended. All of it but `outcome`'s infrastructure verdict is agent-reported."""

    outcome: Outcome
    detail: str
    receipt: Receipt | None
    evidence: Path
    events: int
    gaps: list[Gap]
    seconds: dict[str, float]
    provenance: str = "agent_reported"

    @property
    def gradable(self) -> bool:
        """Whether verification may turn this into a reward."""
        return self.outcome.gradable


_RESULT = TypeAdapter(Result)


class Session:
    """An open session. Made by `open_session`; `invoke` once (identical repeats share it), then `close`."""

    def __init__(
        self,
        sandbox: Sandbox,
        spec: SessionSpec,
        *,
        on_event: Callable[[Event], None] | None = None,
        on_phase: Callable[[str, float], None] | None = None,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        if not re.fullmatch(SESSION_ID, spec.session_id):
            raise UsageError(f"Found session id {spec.session_id!r}, needed {SESSION_ID}.", remedy="Choose another.")
        spec.budgets.check()
        self._sandbox = sandbox
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
        self._running: asyncio.Task[Result] | None = None
        self._held: asyncio.Task[object] | None = None
        self.result: Result | None = None
        self._closed = False

    async def open(self) -> None:
        """Check the box and make sure that the agent's runtime is in it.

        Raises:
            PreflightError, InstallError, ArtifactError, SandboxLost: see push.ensure_runtime.
        """
        if self.runtime is not None:
            raise SessionStateError("The session is open already.", remedy="Call open once.")
        spec = self.spec
        want = push.Want(
            agent=spec.agent,
            variant=spec.variant,
            runtime_root=self._runtime_root,
            session_root=self._session_root,
            workdir=spec.workdir,
            urls=[_origin(spec.model.url)] if spec.model else [],
            loopback_ok=spec.loopback_ok or bool(getattr(self._sandbox, "shares_host_network", False)),
            interpreter=spec.interpreter,
            user=spec.user,
        )
        self.runtime, self.installed = await push.ensure_runtime(self._sandbox, want, self.phases)

    async def invoke(self, request: Request) -> Result:
        """Run the agent once and return how it ended; an identical request joins the activation that runs or ran.

        Raises:
            SessionConflict: another request holds this session.
            SandboxLost: the sandbox stopped answering.
            SetupFailed: the runner in the box could not start the session.
        """
        if self.runtime is None or self._closed:
            raise SessionStateError("The session is not open.", remedy="Call open before invoke and close after it.")
        if self._running is None:
            if not self.spec.allow_credentials:
                refuse_credentials(request)
            self._request = request
            self._running = asyncio.create_task(self._activate(request))
        elif request != self._request:
            raise SessionConflict("Another request holds this session.", remedy="Open a session with another id.")
        return await asyncio.shield(self._running)

    async def close(self) -> Result | None:
        """Stop the agent, collect to the end, remove the session's folder. Safe to repeat until it succeeds.

        Returns:
            The final result, or None when nothing was ever invoked.

        Raises:
            SandboxLost: the sandbox stopped answering; what was collected is on the host's disk.
        """
        if self._closed or self._running is None or self.runtime is None:
            self._finish()
            return self.result
        with self.phases.step("close"):
            if not self._running.done():
                await self._stop()
            await asyncio.wait({self._running})
            await self._release()
            lost = self.result is not None and self.result.outcome is Outcome.SANDBOX_LOST
            with contextlib.suppress(SandboxLost) if lost else contextlib.nullcontext():
                await self._verb(["stop", "--remove"], bound_s=self.spec.budgets.stop_s)
        self._finish()
        return self.result

    def _finish(self) -> None:
        if not self._closed:
            self._closed = True
            self.collector.close()

    async def _release(self) -> None:
        """Let the exec that held the runner go: its runner has ended, or never will."""
        if self._held is not None:
            done, _ = await asyncio.wait({self._held}, timeout=HELD_BOUND_S)
            if not done:
                self._held.cancel()
            await asyncio.gather(self._held, return_exceptions=True)
            self._held = None

    async def _activate(self, request: Request) -> Result:
        digest = request_digest(request)
        earlier = self._earlier(digest)
        if earlier is not None:
            return earlier
        try:
            receipt = await self._run_to_end(request, digest)
        except (SandboxLost, SetupFailed, EvidenceError) as error:
            self.collector.end(None)
            return self._conclude(error.outcome, str(error), None)
        self.collector.end(receipt)
        if receipt is None:
            return self._conclude(Outcome.SANDBOX_LOST, "the supervisor is gone and left no receipt", None)
        return self._conclude(outcome_of(receipt), receipt.detail, receipt)

    async def _run_to_end(self, request: Request, digest: str) -> Receipt | None:
        begun = time.monotonic()
        bound_s = request.deadline_s + request.grace_s + STOP_MARGIN_S
        if not await self._claim():
            await self._send(request)
            self._launch(bound_s=bound_s)
        return (await self._follow(digest, begun, begun + bound_s)).receipt

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
            seconds=dict(self.phases.seconds),
        )
        (self.spec.out / RESULT).write_bytes(_RESULT.dump_json(self.result, indent=1) + b"\n")
        return self.result

    async def _claim(self) -> str:
        """Make the session's folder and read its claim: someone may have started this session before."""
        path = shlex.quote(self.paths.path)
        root = shlex.quote(self._session_root)
        script = f"umask 077; mkdir -p {root} && chmod 0755 {root}; mkdir -p {path}; readlink {path}/launch.claim || :"
        done = await push.run(self._sandbox, script, user=self.spec.user)
        if done.return_code != 0:
            raise SetupFailed(
                f"The session's folder could not be made: {(done.stderr or '').strip()[:300]}", code="not-writable"
            )
        return (done.stdout or "").strip()

    async def _send(self, request: Request) -> None:
        local = self.spec.out / "request.json"
        local.write_text(to_json(request))
        local.chmod(0o600)
        await push.foreign(self._sandbox.upload(local, self.paths.request))

    def _launch(self, *, bound_s: float) -> None:
        """Start the runner in the box. Its exec stays open where the sandbox offers no detached one: see runner.sessions."""
        assert self.runtime is not None  # noqa: S101 (held by invoke)
        command = shlex.join(["sh", self.runtime.archive, "run", "--session", self.paths.path, "--hold", "--json"])
        spawn = getattr(self._sandbox, "spawn", None)
        call = (
            spawn(command, user=self.spec.user)
            if spawn is not None
            else self._sandbox.exec(command, timeout_s=bound_s, user=self.spec.user)
        )
        self._held = asyncio.ensure_future(call)

    async def _follow(self, digest: str, begun: float, bound: float) -> Tail:
        """Tail until the session's state is final."""
        repeated = False
        while True:
            tail = await self._tail(wait_s=min(TAIL_WAIT_S, 1.0 if self.collector.offset == 0 else TAIL_WAIT_S))
            if tail.claim and tail.claim != digest:
                raise SessionConflict(
                    f"The session in the box belongs to request {tail.claim[:16]}, found {digest[:16]}.",
                    remedy="Repeat the first request as it was, or open a session with another id.",
                )
            if tail.state in {"ended", "lost"} and tail.next >= tail.size:
                return tail if tail.state == "ended" else await self._finish_lost()
            if tail.state == "absent" and not repeated and time.monotonic() - begun > ABSENT_BOUND_S:
                repeated = True
                await self._start_again()
            if time.monotonic() > bound:
                await self._stop()
                bound += STOP_MARGIN_S

    async def _start_again(self) -> None:
        """The launch left no claim: repeat it in the foreground. The claim makes that safe, and its answer says why."""
        answer = await self._verb(["run", "--detach"], bound_s=STOP_MARGIN_S)
        if answer.failure is not None:
            raise SetupFailed(answer.failure.message, remedy=answer.failure.remedy, code=answer.failure.code)

    async def _finish_lost(self) -> Tail:
        await self._stop()
        return await self._tail(wait_s=0.0)

    async def _tail(self, *, wait_s: float) -> Tail:
        """Ask for evidence once; a lost reply is asked for again from the same offset."""
        words = ["tail", "--session", self.paths.path, "--from", str(self.collector.offset), "--wait", str(wait_s), "--json"]
        for attempt in range(1, TRANSPORT_TRIES + 1):
            try:
                done = await self._run(words, bound_s=wait_s + TAIL_MARGIN_S)
                return self.collector.feed((done.stdout or "").strip())
            except (SandboxLost, EvidenceError) as error:
                if attempt == TRANSPORT_TRIES or error.code == SandboxLost.code:
                    raise
                await asyncio.sleep(0.2 * 2**attempt)
        raise AssertionError("unreachable")

    async def _stop(self) -> None:
        await self._verb(["stop"], bound_s=self.spec.budgets.stop_s)

    async def _verb(self, words: list[str], *, bound_s: float) -> Answer:
        done = await self._run([words[0], "--session", self.paths.path, *words[1:], "--json"], bound_s=bound_s)
        return push.answer_of(done, words[0])

    async def _run(self, words: list[str], *, bound_s: float) -> ExecResult:
        assert self.runtime is not None  # noqa: S101 (held by invoke)
        return await push.run(
            self._sandbox, shlex.join(["sh", self.runtime.archive, *words]), user=self.spec.user, timeout_s=bound_s
        )

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
    on_event: Callable[[Event], None] | None = None,
    on_phase: Callable[[str, float], None] | None = None,
    on_note: Callable[[str], None] | None = None,
) -> AsyncIterator[Session]:
    """Open a session, and close it whatever happens.

    Raises:
        BoxstrapError: as Session.open, Session.invoke and Session.close do.
    """
    session = Session(sandbox, spec, on_event=on_event, on_phase=on_phase, on_note=on_note)
    try:
        await session.open()
        yield session
    finally:
        await session.close()


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
