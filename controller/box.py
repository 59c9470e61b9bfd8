# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The session as it is in the box: claim, launch, follow its evidence, stop, bring the rest out, remove.

Every call is safe to repeat, and is repeated for a few seconds when the way to the box is interrupted. It refuses to wait
without an end for a box that answers nonsense: the agent may have replaced everything in there.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from boxstrap.controller import push
from boxstrap.controller.collect import EVIDENCE_MAX, Collector
from boxstrap.controller.errors import (
    CleanupUnconfirmed,
    EvidenceError,
    SandboxLost,
    SessionConflict,
    SetupFailed,
)
from boxstrap.controller.follower import FOLLOW_S, Follower
from boxstrap.controller.inbox import Inbox
from boxstrap.controller.sandbox import Conversing, ExecResult, Sandbox
from boxstrap.controller.sources import Sources
from boxstrap.runner.layout import SessionPaths
from boxstrap.runner.wire import STOPPED_CLAIM, Answer, Code, Request, Sink, Tail, session_brand, to_json

TAIL_WAIT_S = 20.0
TAIL_MARGIN_S = 30.0
ABSENT_BOUND_S = 5.0
"""How long a launched session may stay unclaimed before the launch is repeated in the foreground, to hear why."""
STOP_MARGIN_S = 60.0
HELD_BOUND_S = 5.0
PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.5)
"""Between tries when the sandbox is not there: an interruption is bridged, a loss is told after three seconds."""
PATIENCE_S = 60.0
"""How long a box that runs may give no sensible answer: an agent can kill whatever we start, or leave no free process."""
STOP_TRIES = 3

_QUELL = """brand=$1
for signal in STOP STOP KILL; do
    for process in /proc/[0-9]*; do
        while read -r a b c d rest; do
            [ "$a $b $c $d" != "Max realtime timeout $brand" ] || kill -"$signal" "${process#/proc/}"
        done <"$process/limits"
    done
done 2>/dev/null
:"""
"""For a box in which no Python lives long enough to stop anything. Nothing but the shell's own words: there may be no
process left to start. It freezes what bears the session's brand, twice, before it kills."""


_Result = TypeVar("_Result")


@runtime_checkable
class Salvaging(Protocol):
    """A sandbox whose disk can be read when nothing in it runs."""

    async def salvage(self, remote_path: str, local_path: Path, *, max_bytes: int) -> None:
        """Copy one file out of a sandbox in any state.

        Raises:
            FileNotFoundError: it is not there.
            EvidenceError: it is larger than `max_bytes`, or no regular file.
            SandboxLost: the sandbox was removed.
        """


class BoxSession:
    """One session's side in the box."""

    def __init__(
        self,
        sandbox: Sandbox,
        paths: SessionPaths,
        archive: str,
        collector: Collector,
        *,
        user: str | int | None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._sandbox = sandbox
        self._paths = paths
        self._archive = archive
        self._collector = collector
        self._user = user
        self._held: list[asyncio.Future[object]] = []
        self._warm = False
        """Whether something waits in the box, or may, that this side has started."""
        follower = Follower(sandbox, self._following, user=user) if isinstance(sandbox, Conversing) else None
        self._sources = Sources(collector, follower, note)

    async def claim(self) -> str:
        """Make the session's folder and read its claim: someone may have started this session before.

        Raises:
            SetupFailed, SandboxLost: see _make.
        """
        return await self._make(self._paths.claim)

    async def prewarm(self, request: Request, local: Path, *, bound_s: float) -> None:
        """Start what needs no prompt, and let it wait for `launch`, unless the session has begun or something waits already.

        Raises:
            SetupFailed, SandboxLost: see _make.
        """
        if not await self._make(self._paths.claim, self._paths.warm):
            self._warm = True
            _write_privately(local, to_json(request))
            await self.steadily(lambda: push.foreign(self._sandbox.upload(local, self._paths.prewarm)))
            self._hold(["run", "--prewarm"], bound_s=bound_s)

    async def cool_down(self, *, bound_s: float, keep: bool) -> None:
        """Undo `prewarm` where no request came, as far as it got.

        Raises:
            CleanupUnconfirmed, SandboxLost: see remove.
        """
        if self._warm and await self.claim() in {"", STOPPED_CLAIM}:
            await self.remove(bound_s=bound_s, keep=keep)
        else:  # the folder is another one's, or empty
            path = shlex.quote(self._paths.path)
            await self._run(f'rmdir {path} "$(dirname {path})" 2>/dev/null; :', bound_s=bound_s)
        await self.release()

    async def _make(self, *links: str) -> str:
        """Make the session's folder, and say where the first of some links in it leads that is there.

        Raises:
            SetupFailed: the folder could not be made.
            SandboxLost: the sandbox does not answer.
        """
        path = shlex.quote(self._paths.path)
        root = shlex.quote(self._paths.path.rpartition("/")[0])
        reads = " || ".join(f"readlink {shlex.quote(link)}" for link in links)
        script = f"umask 077; mkdir -p {root} && chmod 0755 {root}; mkdir -p {path}; {reads} || :"
        done = await self._run(script, bound_s=180)
        if done.return_code != 0:
            raise SetupFailed(
                f"The session's folder could not be made: {(done.stderr or '').strip()[:300]}", code="not-writable"
            )
        return (done.stdout or "").strip()

    async def send(self, request: Request, local: Path) -> None:
        """Put request.json into the folder; `local` keeps the host's copy."""
        _write_privately(local, to_json(request))
        await self.steadily(lambda: push.foreign(self._sandbox.upload(local, self._paths.request)))

    async def receive(self, inbox: Inbox, local: Path) -> None:
        """Take what the box pushes into `inbox`, and tell the box where that is; `local` is a name for the time being."""
        self._sources.inbox = inbox
        _write_privately(local, to_json(Sink(url=inbox.url, token=inbox.token)))
        try:
            await self.steadily(lambda: push.foreign(self._sandbox.upload(local, self._paths.sink)))
        finally:
            local.unlink()  # noqa: ASYNC240 (one call on a local disk)

    def launch(self, *, bound_s: float) -> None:
        """Start the runner in the box. Its exec stays open where the sandbox offers no detached one: see runner.sessions."""
        self._hold(["run", "--hold"], bound_s=bound_s)

    def _hold(self, words: list[str], *, bound_s: float) -> None:
        command = self._command(words)
        spawn = getattr(self._sandbox, "spawn", None)
        call = (
            spawn(command, user=self._user)
            if spawn is not None
            else self._sandbox.exec(command, timeout_s=bound_s, user=self._user)
        )
        self._held.append(asyncio.ensure_future(call))

    async def release(self) -> None:
        """Let the execs go that held the runner and followed it: the runner has ended, or never will."""
        await self._sources.close()
        if self._held:
            _, pending = await asyncio.wait(self._held, timeout=HELD_BOUND_S)
            for held in pending:
                held.cancel()
            await asyncio.gather(*self._held, return_exceptions=True)
            self._held.clear()

    async def follow(self, digest: str, *, bound_s: float, launched: bool, stop_s: float) -> Tail:
        """Tail until the session's state is final, or until it was stopped before it began.

        Raises:
            SessionConflict: another request holds the session.
            SetupFailed: the runner could not start; its answer says why.
            SandboxLost: the sandbox is gone, or what answers there never comes to an end.
            EvidenceError: it gave no sensible answer for too long, or passed a cap.
        """
        begun = time.monotonic()
        bound = begun + bound_s
        stopped = ours = False
        while True:
            asked = time.monotonic()
            tail = await self._sources.next()
            if tail is None:
                tail = await self._tail(wait_s=1.0 if self._collector.offset == 0 else TAIL_WAIT_S)
            if tail.claim == STOPPED_CLAIM:
                return tail
            if ours and tail.claim != digest:
                raise SandboxLost(
                    "The session's claim was replaced in the box.", remedy="The agent can do that, and nobody else."
                )
            ours = tail.claim == digest
            if tail.claim and not ours:
                raise SessionConflict(
                    f"The session in the box belongs to request {tail.claim[:16]}, found {digest[:16]}.",
                    remedy="Repeat the first request as it was, or open a session with another id.",
                )
            if tail.state in {"ended", "lost"} and (tail.next >= tail.size or not tail.chunk):
                return tail if tail.state == "ended" else await self.catch_up(stop_s=stop_s)
            now = time.monotonic()
            if tail.state == "absent" and launched and now - begun > ABSENT_BOUND_S:
                launched = False
                await self._launch_again()
            if now > bound:
                if stopped:
                    raise SandboxLost("The session does not end.", remedy="Look at what runs in the box.")
                stopped = True
                self._sources.inbox = None  # what ends now is asked for: whoever has the box's token can push that all goes on
                await self.stop(bound_s=stop_s)
                bound = time.monotonic() + STOP_MARGIN_S
            if not tail.chunk and now - asked < PAUSES_S[1]:
                await asyncio.sleep(PAUSES_S[1])  # what answers at once with nothing is not what we put there

    async def catch_up(self, *, stop_s: float) -> Tail:
        """Stop what is left, and collect to the end."""
        await self.stop(bound_s=stop_s)
        while True:
            before = self._collector.offset
            tail = await self._tail(wait_s=0.0)
            if tail.next >= tail.size or self._collector.offset == before:
                return tail

    async def stop(self, *, bound_s: float) -> Answer:
        """Stop the session, whatever the agent does to those who try.

        Raises:
            CleanupUnconfirmed: nothing that was tried gave an answer.
            SandboxLost: the sandbox is gone.
        """
        return await self._insist(["stop"], bound_s=bound_s)

    async def remove(self, *, bound_s: float, keep: bool = False) -> None:
        """Stop it again, prove that nothing is left, and remove its folder, or keep that for whoever wants to look.

        Raises:
            CleanupUnconfirmed: processes of the session are left; the folder stays for the next try.
            SandboxLost: the sandbox is gone.
        """
        answer = await self._insist(["stop", *([] if keep else ["--remove"])], bound_s=bound_s)
        failure = answer.failure
        if failure is not None and failure.code != Code.SESSION_MISSING:
            raise CleanupUnconfirmed(failure.message, remedy=failure.remedy or "Close again.")
        if answer.data is not None and answer.data.get("state") == "running":
            raise CleanupUnconfirmed("The session is still running.", remedy="Close again.")

    async def salvage(self, local: Path) -> None:
        """Take the evidence out of a box that runs no more, where the sandbox can (docker reads a stopped one's disk)."""
        if isinstance(self._sandbox, Salvaging):
            try:
                with contextlib.suppress(SandboxLost, EvidenceError, FileNotFoundError):
                    await push.foreign(self._sandbox.salvage(self._paths.evidence, local, max_bytes=EVIDENCE_MAX))
                    self._collector.feed_file(local)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    local.unlink()  # noqa: ASYNC240 (one call on a local disk)

    async def _launch_again(self) -> None:
        """The launch left no claim: repeat it in the foreground. The claim makes that safe, and its answer says why."""
        answer = push.answer_of(await self._run(self._command(["run", "--detach"]), bound_s=STOP_MARGIN_S), "run")
        if answer.failure is not None and answer.failure.code != Code.SESSION_STOPPED:
            raise SetupFailed(answer.failure.message, remedy=answer.failure.remedy, code=answer.failure.code)

    async def _tail(self, *, wait_s: float) -> Tail:
        """Ask for evidence; a lost or senseless reply is asked for again from the same offset."""
        give_up = time.monotonic() + PATIENCE_S
        attempt = 0
        while True:
            words = ["tail", "--from", str(self._collector.offset), "--wait", str(wait_s)]
            try:
                done = await self._run(self._command(words), bound_s=wait_s + TAIL_MARGIN_S)
                return self._collector.feed((done.stdout or "").strip())
            except (EvidenceError, SandboxLost) as error:
                if not error.passing or time.monotonic() > give_up:
                    raise
            await asyncio.sleep(PAUSES_S[min(attempt, len(PAUSES_S) - 1)])
            attempt += 1

    async def _insist(self, words: list[str], *, bound_s: float) -> Answer:
        said = ""
        brand = str(session_brand(self._paths.path))
        for _ in range(STOP_TRIES):
            try:
                return push.answer_of(await self._run(self._command(words), bound_s=bound_s), words[0])
            except (SetupFailed, SandboxLost) as error:
                if isinstance(error, SandboxLost) and not error.passing:
                    raise
                said = error.message
            with contextlib.suppress(SandboxLost):
                await self._run(shlex.join(["sh", "-c", _QUELL, "sh", brand]), bound_s=bound_s)
        raise CleanupUnconfirmed(
            f"The session could not be stopped in an orderly way: {said}",
            remedy="What bears its mark was killed, as far as that could be reached. Close again.",
        )

    def _following(self) -> str:
        return self._command(["tail", "--from", str(self._collector.offset), "--follow", str(FOLLOW_S)])

    def _command(self, words: list[str]) -> str:
        return shlex.join(["sh", self._archive, words[0], "--session", self._paths.path, *words[1:], "--json"])

    async def _run(self, command: str, *, bound_s: float) -> ExecResult:
        return await self.steadily(lambda: push.run(self._sandbox, command, user=self._user, timeout_s=bound_s))

    async def steadily(self, call: Callable[[], Awaitable[_Result]]) -> _Result:
        """Do what is safe to repeat; a sandbox that is not there is asked again for three seconds."""
        for pause in PAUSES_S:
            try:
                return await call()
            except SandboxLost as error:
                if error.passing:
                    raise
            await asyncio.sleep(pause)
        return await call()


def _write_privately(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)
