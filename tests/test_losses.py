# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Boxes that fill up, run out, are cut off or are killed; agents that fight back. The engine's own lists are the oracle."""

from __future__ import annotations

import asyncio
from pathlib import Path

import docker
import pytest
from containers import Box, Containers
from cut_line import CutLine
from soak import from_disk
from test_session import once, spec

from boxstrap.controller import box as box_module
from boxstrap.controller.budgets import Budgets
from boxstrap.controller.collect import read_events
from boxstrap.controller.errors import CleanupUnconfirmed
from boxstrap.controller.sandboxes.docker import DockerSandbox
from boxstrap.controller.session import Result, Session
from boxstrap.runner.wire import Event, Outcome, session_brand

pytestmark = pytest.mark.container
COUNTING = "i=0; while [ $i -lt 60 ]; do i=$((i+1)); echo line $i; sleep 0.1; done"
LINES = [f"line {number}" for number in range(1, 61)]


def others(box: Box) -> list[str]:
    """List what runs in the box besides PID 1: the engine asks the host for that."""
    listed = box.container.top()
    commands = [str(row[listed["Titles"].index("CMD")]) for row in listed["Processes"]]
    return [command for command in commands if not command.startswith("sleep 2147483647")]


def texts(result: Result) -> list[str]:
    """List the agent's lines."""
    return [str(event.data["text"]) for event in read_events(result.evidence) if event.kind == "log"]


class Seen:
    """Tells when the agent has written so many lines."""

    def __init__(self, lines: int) -> None:
        self._left = lines
        self.event = asyncio.Event()

    def __call__(self, event: Event) -> None:
        """Count."""
        self._left -= event.kind == "log"
        if self._left <= 0:
            self.event.set()


async def test_fork_bomb_is_frozen_and_killed(container: Containers, tmp_path: Path) -> None:
    """It forks as fast as slots are freed, and leaves none for our own verbs; the supervisor needs none."""
    box = container("debian:12", network="none", pids=120)
    (tmp_path / "bomb").write_text("trap '' TERM; while :; do sh /work/bomb 2>/dev/null & done\n")
    box.put(tmp_path / "bomb", "/work/bomb")
    box.check("mkfifo /work/fifo")
    # A shell that cannot fork ends: this one forks once, and then waits without a fork.
    wanted = spec(
        tmp_path, "sh", "-c", "sh /work/bomb 2>/dev/null & read never </work/fifo", budgets=Budgets().with_worker(2.0)
    )
    result = await once(DockerSandbox(box.id), wanted)
    assert result.receipt is not None, result.detail
    assert (result.outcome, result.receipt.cleanup_confirmed) == (Outcome.DEADLINE_EXCEEDED, True)
    assert others(box) == []


async def test_agent_that_kills_every_python_for_ever_is_stopped_by_the_shells_own_words(
    container: Containers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Supervisor, watchdog, every verb of ours; and a daemon with nothing but its brand."""
    monkeypatch.setattr(box_module, "PATIENCE_S", 3.0)
    box = container("debian:12", network="none")
    script = """echo on; env -i /usr/bin/setsid sleep 600 </dev/null >/dev/null 2>&1 & trap '' TERM; sleep 0.5
    while :; do for p in /proc/[0-9]*; do case $(readlink $p/exe) in */python3*) kill -9 ${p#/proc/}; esac; done; done"""
    session = Session(DockerSandbox(box.id), spec(tmp_path, "sh", "-c", script))
    await session.open()
    result = await session.invoke(session.spec.request("p"))
    assert result.outcome is Outcome.SANDBOX_LOST
    await session.close()
    assert "on" in texts(result)
    assert others(box) == []
    assert box.check("ls -A /tmp") == ""


async def test_out_of_memory_is_named(container: Containers, tmp_path: Path) -> None:
    """Exit status 137 or SIGKILL alone could be anything; the memory group's count tells."""
    box = container("debian:12", network="none", memory="200m")
    script = "x=$(head -c 1000000000 /dev/zero | tr '\\0' x); echo survived"
    result = await once(DockerSandbox(box.id), spec(tmp_path, "sh", "-c", script))
    assert result.receipt is not None
    assert (result.outcome, result.receipt.oom_killed) == (Outcome.AGENT_FAILED, True)
    assert "out of memory" in result.detail
    assert result.receipt.peak_rss_bytes > 50 << 20


async def test_what_would_not_go_is_named_and_closing_again_tries_again(container: Containers, tmp_path: Path) -> None:
    """A process of root's in a session of another user: it cannot be killed, so nothing is confirmed, until someone does."""
    box = container("debian:12", network="none")
    box.check("chmod 1777 /opt && mkdir -m 1777 /work")
    wanted = spec(tmp_path, "sh", "-c", "echo on; sleep 1", user="1000", workdir="/work")
    session = Session(DockerSandbox(box.id), wanted)
    await session.open()
    brand = session_brand(session.paths.path)
    box.container.exec_run(["prlimit", f"--rttime={brand}:unlimited", "sleep", "600"], detach=True)
    result = await session.invoke(wanted.request("p"))
    assert result.receipt is not None
    assert (result.receipt.cleanup_confirmed, [one.name for one in result.receipt.survivors]) == (False, ["sleep"])
    with pytest.raises(CleanupUnconfirmed, match="sleep"):
        await session.close()
    box.check("for p in /proc/[0-9]*; do case $(tr '\\0' ' ' <$p/cmdline) in 'sleep 600 ') kill -9 ${p#/proc/}; esac; done")
    await session.close()
    assert others(box) == []
    assert box.check("ls -A /tmp") == ""


async def test_full_disk_costs_events_that_are_counted_and_no_receipt(container: Containers, tmp_path: Path) -> None:
    box = container("debian:12", network="none", tmpfs={"/small": "size=3m,mode=1777"})
    await once(DockerSandbox(box.id), spec(tmp_path, "true", session_id="first", out=tmp_path / "first"))
    kept = 'until grep -q \'"text":"before"\' /small/s/*/evidence.ndjson; do sleep 0.02; done'
    filled = f"cat /dev/zero > $HOME/fill; {COUNTING.replace('sleep 0.1', ':')}; rm $HOME/fill"
    script = f"echo before; {kept}; {filled}; sleep 1; echo after"
    wanted = spec(tmp_path, "sh", "-c", script, session_root="/small/s")
    result = await once(DockerSandbox(box.id), wanted)
    assert (result.outcome, result.gaps) == (Outcome.COMPLETED, [])
    lost = [event.data for event in read_events(result.evidence) if event.kind == "gap"]
    seen = texts(result)
    assert (seen[0], seen[-1]) == ("before", "after")
    assert sum(int(str(gap["dropped"])) for gap in lost) + len(seen) == 62


async def test_line_to_the_engine_that_is_cut_for_a_moment_is_bridged(container: Containers, tmp_path: Path) -> None:
    box = container("debian:12", network="none")
    seen = Seen(3)
    with CutLine(tmp_path) as line:
        client = docker.DockerClient(base_url=line.url, timeout=20)
        sandbox = DockerSandbox(box.id, client=client)
        task = asyncio.create_task(once(sandbox, spec(tmp_path, "sh", "-c", COUNTING), on_event=seen))
        await asyncio.wait_for(seen.event.wait(), 90)
        for _ in range(2):
            line.cut()
            await asyncio.sleep(1.0)  # the length of the interruption is what is tested
            line.mend()
            await asyncio.sleep(0.7)
        result = await asyncio.wait_for(task, 60)
        client.close()
    assert (result.outcome, result.gaps, texts(result)) == (Outcome.COMPLETED, [], LINES)


async def test_line_that_stays_cut_is_a_lost_sandbox_and_the_next_controller_attaches(
    container: Containers, tmp_path: Path
) -> None:
    """The first says so within seconds and keeps what came; the second has every line, each once."""
    box = container("debian:12", network="none")
    seen = Seen(5)
    wanted = spec(tmp_path, "sh", "-c", COUNTING)
    with CutLine(tmp_path) as line:
        client = docker.DockerClient(base_url=line.url, timeout=20)
        task = asyncio.create_task(once(DockerSandbox(box.id, client=client), wanted, on_event=seen))
        await asyncio.wait_for(seen.event.wait(), 90)
        line.cut()
        first = await asyncio.wait_for(task, 30)
    assert (first.outcome, first.receipt) == (Outcome.SANDBOX_LOST, None)
    assert texts(first) == LINES[: len(texts(first))]
    second = await once(DockerSandbox(box.id), wanted)
    assert (second.outcome, second.gaps, texts(second)) == (Outcome.COMPLETED, [], LINES)


@pytest.mark.parametrize("how", ["kill", "restart"])
async def test_what_a_killed_box_had_written_is_all_collected(
    container: Containers, engine: docker.DockerClient, tmp_path: Path, how: str
) -> None:
    """From the disk of a box that is dead, or from one that is back: byte for byte what lay there."""
    box = container("debian:12", network="none")
    seen = Seen(5)
    wanted = spec(tmp_path, "sh", "-c", f"while :; do {COUNTING.replace('0.1', '0.01')}; done")
    session = Session(DockerSandbox(box.id), wanted, on_event=seen)
    await session.open()
    task = asyncio.create_task(session.invoke(wanted.request("p")))
    await asyncio.wait_for(seen.event.wait(), 60)
    await asyncio.to_thread(getattr(box, how))
    result = await asyncio.wait_for(task, 60)
    assert result.outcome is Outcome.SANDBOX_LOST
    written = from_disk(engine, box.id, session.paths.evidence)
    assert written is not None
    assert (tmp_path / "out" / "evidence.ndjson").read_bytes() == written
    await session.close()
    if how == "restart":
        assert session.result is not None
        assert session.result.receipt is not None
        assert (session.result.receipt.supervisor_lost, session.result.receipt.cleanup_confirmed) == (True, True)
        assert box.check("ls -A /tmp") == ""
