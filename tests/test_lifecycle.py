# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Open, invoke, close as a state machine; and cancelled at each of its awaits, it leaves nothing in the box."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from polling import eventually
from test_session import MARKED, spec
from test_supervisor import pids_below

from boxstrap.controller.errors import CleanupUnconfirmed, SandboxLost, SessionConflict, SessionStateError
from boxstrap.controller.sandboxes.docker import DockerSandbox
from boxstrap.controller.sandboxes.local import LocalSandbox
from boxstrap.controller.sandboxes.output import Output, failed
from boxstrap.controller.session import Session, open_session
from boxstrap.runner.wire import Outcome


class Meddling:
    """A sandbox that lets someone do something at each call: `before(n, command)`, n from 1; what it returns is the answer.

    It has the calls that every sandbox has, and a detached start; nothing is held open.
    """

    shares_host_network = True

    def __init__(
        self, inner: Path | LocalSandbox | DockerSandbox, before: Callable[[int, str], Output | None] = lambda *_: None
    ) -> None:
        self.inner = LocalSandbox(inner) if isinstance(inner, Path) else inner
        if isinstance(self.inner, LocalSandbox):
            self.roots = self.inner.roots
        self.before = before
        self.calls = 0

    def _meddle(self, command: str) -> Output | None:
        self.calls += 1
        return self.before(self.calls, command)

    async def exec(self, command: str, **how: Any) -> Output:
        """Run, unless there is an answer already."""
        answer = self._meddle(command)
        return answer if answer is not None else await self.inner.exec(command, **how)

    async def spawn(self, command: str, **how: Any) -> None:
        """Start."""
        self._meddle(command)
        await self.inner.spawn(command, **how)

    async def upload(self, local_path: str | os.PathLike[str], remote_path: str) -> None:
        """Copy in."""
        self._meddle(f"upload {remote_path}")
        await self.inner.upload(local_path, remote_path)

    async def download(self, remote_path: str, local_path: str | os.PathLike[str], *, max_bytes: int = 2**32) -> None:
        """Copy out."""
        self._meddle(f"download {remote_path}")
        await self.inner.download(remote_path, local_path, max_bytes=max_bytes)


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A box for all of these: the runtime is installed once."""
    return tmp_path_factory.mktemp("box")


class Box:
    """Where the sweep takes place, and an oracle of what is left there."""

    def __init__(self, inner: LocalSandbox | DockerSandbox, left: Callable[[str], object]) -> None:
        self.inner = inner
        self.left = left
        """Gives what is left of the session of that name: nothing, it should be."""


@pytest.fixture(params=["local", pytest.param("container", marks=pytest.mark.container)])
def swept(request: pytest.FixtureRequest, tmp_path: Path) -> Box:
    """A folder of this machine, and a container without a network."""
    if request.param == "local":
        folder = tmp_path / "box"
        return Box(LocalSandbox(folder), lambda name: pids_below(f"BOXSTRAP_SESSION={name}") + remains(folder))
    box = request.getfixturevalue("container")("debian:12", network="none")
    files = "ls -Ad /tmp/* /tmp/.[!.]* /.boxstrap* /opt/.boxstrap* /opt/*/.boxstrap* /opt/*/.stage-* 2>/dev/null"
    return Box(DockerSandbox(box.id), lambda _: box.check(f"{MARKED}; {files} || :").removeprefix("0"))


def remains(box: Path) -> list[str]:
    """List what a session may have left: folders of sessions, of pushes, of stages."""
    sessions = [str(path) for path in box.glob("tmp/nemo-gym-command/*")]
    return sessions + [str(path) for path in box.glob("opt/*/.stage-*")]


async def test_cancelled_at_each_await_it_leaves_nothing_in_the_box(tmp_path: Path, swept: Box) -> None:
    """The task is cancelled while its n-th call to the box runs, for every n there is, and again a moment later."""
    point = completed = 0
    while not completed:
        point += 1
        assert point < 60
        token = f"sweep-{os.getpid()}-{point}"
        wanted = spec(
            tmp_path,
            "sh",
            "-c",
            "(setsid sleep 600 &) ; echo on; sleep 0.2",
            workdir="/",
            session_id=token,
            out=tmp_path / token,
        )

        async def whole(sandbox: Meddling, wanted: Any = wanted) -> Outcome:
            async with open_session(sandbox, wanted) as session:
                result = await session.invoke(wanted.request("p"))
            return result.outcome

        tasks: list[asyncio.Task[Outcome]] = []

        def cancel(n: int, command: str, point: int = point, tasks: list[asyncio.Task[Outcome]] = tasks) -> None:
            del command
            if n in {point, point + 2}:
                asyncio.get_running_loop().call_later(0.02 * (point % 3), tasks[0].cancel)

        sandbox = Meddling(swept.inner, cancel)
        task = asyncio.create_task(whole(sandbox))
        tasks.append(task)
        try:
            outcome = await asyncio.wait_for(asyncio.shield(task), 90)
            completed = sandbox.calls < point
            assert outcome in {Outcome.COMPLETED, Outcome.CANCELLED}
        except asyncio.CancelledError:
            assert task.cancelled()
        assert not await asyncio.to_thread(swept.left, token), point
    assert point > 8


async def test_every_illegal_order_is_refused_and_says_where_it_stands(tmp_path: Path, box: Path) -> None:
    wanted = spec(tmp_path, "true")
    session = Session(LocalSandbox(box), wanted)
    with pytest.raises(SessionStateError, match="not open"):
        await session.invoke(wanted.request("p"))
    opening = asyncio.create_task(session.open())
    await asyncio.sleep(0)
    for early in (session.open, session.close, lambda: session.invoke(wanted.request("p"))):
        with pytest.raises(SessionStateError, match="opening"):
            await early()
    await opening
    with pytest.raises(SessionStateError, match="open already"):
        await session.open()
    first = await session.invoke(wanted.request("p"))
    assert await session.invoke(wanted.request("p")) is first
    with pytest.raises(SessionConflict):
        await session.invoke(wanted.request("q"))
    assert await session.close() == first
    assert await session.close() == first
    for late in (session.open, lambda: session.invoke(wanted.request("p"))):
        with pytest.raises(SessionStateError, match="closed"):
            await late()


async def test_open_that_failed_can_be_repeated(tmp_path: Path, box: Path) -> None:
    broken = True
    sandbox = Meddling(box, lambda n, _: failed("sandbox_lost", "away") if broken else None)
    wanted = spec(tmp_path, "true")
    session = Session(sandbox, wanted)
    with pytest.raises(SandboxLost):
        await session.open()
    broken = False
    await session.open()
    assert (await session.invoke(wanted.request("p"))).outcome is Outcome.COMPLETED
    await session.close()


@pytest.mark.parametrize("how", ["lost", "nonsense"])
async def test_close_that_failed_is_repeated_until_it_succeeds(tmp_path: Path, box: Path, how: str) -> None:
    """An answer that is none never counts as closed; two closes at once are one."""
    broken = False
    answers = {"lost": failed("sandbox_lost", "away"), "nonsense": Output(stdout="%#!", stderr="", return_code=0)}
    sandbox = Meddling(box, lambda n, command: answers[how] if broken and " stop " in command else None)
    wanted = spec(tmp_path, "true")
    session = Session(sandbox, wanted)
    await session.open()
    result = await session.invoke(wanted.request("p"))
    broken = True
    for _ in range(2):
        closed = await asyncio.gather(session.close(), session.close(), return_exceptions=True)
        assert all(isinstance(one, (SandboxLost, CleanupUnconfirmed)) for one in closed), closed
        assert remains(box)
    broken = False
    assert await session.close() == result
    assert remains(box) == []


async def test_interruption_of_two_seconds_is_bridged(tmp_path: Path, box: Path) -> None:
    """Every call is refused for a while, several times: the run goes on as if nothing had been."""
    away_until = 0.0

    def meddle(n: int, command: str) -> Output | None:
        nonlocal away_until
        now = asyncio.get_running_loop().time()
        if n % 7 == 6 and now > away_until and "install" not in command and "check" not in command:
            away_until = now + 1.2
        return failed("sandbox_lost", "away") if now < away_until and " tail " in f"{command} " else None

    wanted = spec(tmp_path, "sh", "-c", "for i in 1 2 3 4 5 6 7 8 9; do echo $i; sleep 0.3; done")
    async with open_session(Meddling(box, meddle), wanted) as session:
        result = await session.invoke(wanted.request("p"))
    assert (result.outcome, result.gaps) == (Outcome.COMPLETED, [])


async def test_conflict_leaves_the_other_ones_session_alone(tmp_path: Path, box: Path) -> None:
    """Two requests under one id: the second is refused, and its close does not stop the first."""
    first = spec(tmp_path, "sh", "-c", "echo on; exec sleep 600", session_id=f"one-{os.getpid()}", out=tmp_path / "first")
    second = spec(tmp_path, "true", session_id=first.session_id, out=tmp_path / "second")
    async with open_session(LocalSandbox(box), first) as running:
        invoked = asyncio.create_task(running.invoke(first.request("p")))
        await asyncio.to_thread(eventually, lambda: running.collector.events >= 2)
        with pytest.raises(SessionConflict):
            async with open_session(LocalSandbox(box), second) as session:
                await session.invoke(second.request("q"))
        assert not invoked.done()
        assert pids_below(f"BOXSTRAP_SESSION={first.session_id}")
    assert (await invoked).outcome is Outcome.CANCELLED
    eventually(lambda: pids_below(f"BOXSTRAP_SESSION={first.session_id}") == [])
