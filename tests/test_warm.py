# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What is started before its request is known: handed over, called off, killed, raced; there is never a second activation."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from polling import eventually
from sample_repo import PROMPT, make_sample_repo
from scripted_model import ScriptedModel
from test_lifecycle import remains
from test_session import spec
from test_supervisor import START, Runner, pids_below

from boxstrap.controller.collect import read_events
from boxstrap.controller.listening import listening
from boxstrap.controller.sandboxes.local import LocalSandbox
from boxstrap.controller.session import Session, open_session
from boxstrap.runner.wire import Model, Outcome, Request, outcome_of, prewarm_of, to_json

IMPATIENT = START.replace("from", "import boxstrap.runner.warm as w; w.WARM_MAX_S = 0.5; from", 1)


class Warmed(Runner):
    """A session folder whose `run --prewarm` was started, and what its agent did, as lines of one file."""

    did: Path

    def warm(self, *argv: str, settled: bool = True, **fields: Any) -> subprocess.Popen[bytes]:
        """Write prewarm.json and start it."""
        request = self.prompted(*argv, **fields)
        (self.folder / "prewarm.json").write_text(to_json(prewarm_of(request)))
        process = self.start("run", "--prewarm", "--json")
        if settled:
            eventually(lambda: self.verb("status")[1]["data"]["state"] == "warm")
        return process

    def prompted(self, *argv: str, **fields: Any) -> Request:
        """Write the request itself: the prompt is all that it has more."""
        self.did = self.folder.parent / "did"
        return self.request("sh", "-c", f"echo $$ >>{self.did}; {argv[0] if argv else ':'}", prompt="do it", **fields)

    def once(self) -> None:
        """See that it ended well, that it ran once, and that nothing is left."""
        receipt = self.receipt()
        assert outcome_of(receipt) is Outcome.COMPLETED, receipt
        assert len(self.did.read_text().splitlines()) == 1
        assert [event["data"]["argv"] for event in self.events("agent_started")] != []
        assert len(self.events("agent_started")) == 1
        assert [event["seq"] for event in self.events()] == list(range(1, len(self.events()) + 1))
        eventually(lambda: pids_below(f"BOXSTRAP_SESSION={self.folder.name}") == [])


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Warmed]:
    runner = Warmed(tmp_path / "sessions" / f"w{os.getpid()}-{tmp_path.name}"[:100])
    yield runner
    runner.end()


def test_request_is_handed_over_and_told_like_any_other(session: Warmed) -> None:
    """The same kinds of evidence as without; the clock of the deadline starts with the request."""
    holder = session.warm("sleep 0.1", deadline_s=1.0)
    supervisor = session.supervisor()
    assert not (session.folder / "evidence.ndjson").exists()
    began = time.time()
    status, answer = session.verb("run", "--hold")
    assert (status, answer["data"]["attached"]) == (0, True)
    eventually(lambda: holder.poll() is not None)
    session.once()
    assert session.supervisor() == supervisor
    assert (session.receipt().started_at or 0) >= began
    warm = [event["kind"] for event in session.events()]
    cold = Warmed(session.folder.parent / "cold")
    cold.prompted("sleep 0.1", deadline_s=1.0)
    cold.run()
    assert warm == [event["kind"] for event in cold.events()]


@pytest.mark.parametrize("difference", [{"deadline_s": 59.0}, {"env": {"MORE": "1"}}, {"grace_s": 0.4}])
def test_request_that_differs_is_started_anew(session: Warmed, difference: dict[str, Any]) -> None:
    session.warm()
    supervisor = session.supervisor()
    session.prompted(**difference)
    session.run()
    session.once()
    assert session.supervisor() != supervisor


def test_stop_before_a_request_leaves_nothing(session: Warmed) -> None:
    holder = session.warm(model=Model(url="http://127.0.0.1:9/v1", name="none"))
    assert len(pids_below(f"BOXSTRAP_SESSION={session.folder.name}")) == 1  # the gateway
    assert session.verb("stop", "--remove")[1]["data"] == {"state": "stopped"}
    assert pids_below(session.folder.name) == []
    assert not session.folder.exists()
    assert holder.poll() is not None


def test_nobody_asks_in_time(session: Warmed) -> None:
    """Then it is as if nothing had been: the same session can be started."""
    session.prompted()
    (session.folder / "prewarm.json").write_text(to_json(prewarm_of(session.prompted())))
    python, sources = session._python
    holder = subprocess.Popen([python, "-I", "-c", IMPATIENT, sources, "run", "--prewarm", "--session", str(session.folder)])
    session.started.append(holder)
    eventually(lambda: holder.poll() is not None)
    assert not (session.folder / "warm").is_symlink()
    assert not (session.folder / "receipt.json").exists()
    assert session.verb("status")[1]["data"]["state"] == "absent"
    session.run()
    session.once()


@pytest.mark.parametrize("victims", ["supervisor", "watchdog", "both"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_whatever_is_killed_while_it_waits_the_request_runs_once(session: Warmed, victims: str, number: signal.Signals) -> None:
    holder = session.warm()
    for pid, name in ((session.supervisor(), "supervisor"), (holder.pid, "watchdog")):
        if victims in {name, "both"}:
            os.kill(pid, number)
    session.prompted()
    session.verb("run", "--hold")
    eventually((session.folder / "receipt.json").exists)
    session.once()


def test_gateway_that_died_while_it_waited_is_nobodys_failure(session: Warmed) -> None:
    model = Model(url="http://127.0.0.1:9/v1", name="none")
    session.warm(model=model)
    (gateway,) = pids_below(f"BOXSTRAP_SESSION={session.folder.name}")
    os.kill(gateway, signal.SIGKILL)
    session.prompted(model=model)
    session.verb("run", "--hold")
    session.once()
    assert session.events("gap") == []


@pytest.mark.parametrize("seed", range(12))
def test_request_may_come_at_any_moment_of_the_start(session: Warmed, seed: int) -> None:
    """`run` is started so many milliseconds after `run --prewarm`: one of the two runs it, never both, never none."""
    holder = session.warm(settled=False)
    began = time.monotonic()
    delay = random.Random(seed).uniform(0.0, 0.25)
    eventually(lambda: time.monotonic() - began >= delay, every_s=0.001)
    session.prompted()
    session.verb("run", "--hold")
    eventually((session.folder / "receipt.json").exists)
    eventually(lambda: holder.poll() is not None)
    session.once()


@pytest.mark.parametrize("seed", range(8))
def test_stop_may_come_at_any_moment_of_the_start(session: Warmed, seed: int) -> None:
    holder = session.warm(settled=False, model=Model(url="http://127.0.0.1:9/v1", name="none"))
    began = time.monotonic()
    delay = random.Random(seed).uniform(0.0, 0.25)
    eventually(lambda: time.monotonic() - began >= delay, every_s=0.001)
    session.verb("stop")
    eventually(lambda: holder.poll() is not None)
    assert pids_below(session.folder.name) == []
    assert not (session.folder / "evidence.ndjson").exists()


def test_only_one_waits(session: Warmed) -> None:
    session.warm()
    assert session.verb("run", "--prewarm")[1]["data"] == {"state": "absent", "attached": True}
    session.verb("run", "--hold")
    eventually((session.folder / "receipt.json").exists)
    assert session.verb("run", "--prewarm")[1]["data"] == {"state": "ended", "attached": True}
    session.once()


def test_prewarm_without_a_workdir_is_refused(session: Warmed) -> None:
    (session.folder.parent).mkdir(parents=True)
    session.prompted(workdir="/nowhere")
    (session.folder / "prewarm.json").write_text(to_json(prewarm_of(session.prompted(workdir="/nowhere"))))
    status, answer = session.verb("run", "--prewarm")
    assert (status, answer["failure"]["code"]) == (69, "workdir-missing")
    assert not (session.folder / "warm").is_symlink()


# The controller's side.


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("box")


async def is_warm(session: Session) -> None:
    """Wait until something waits in the box."""
    said = Path(session.paths.supervisor)
    await asyncio.to_thread(eventually, lambda: said.exists() and json.loads(said.read_text())["claim"] == "")


async def test_session_that_is_never_asked_leaves_nothing(tmp_path: Path, box: Path) -> None:
    wanted = spec(tmp_path, "true")
    async with open_session(LocalSandbox(box), wanted) as session:
        await is_warm(session)
    assert session.result is None
    assert remains(box) == []
    assert pids_below(wanted.session_id) == []


@pytest.mark.parametrize("settled", [True, False])
async def test_evidence_is_the_same_as_without(tmp_path: Path, box: Path, settled: bool) -> None:
    """Whether it was ready in time or not."""
    kinds = []
    for prewarm in (False, True):
        where: dict[str, Any] = {"out": tmp_path / str(prewarm), "session_id": f"{tmp_path.name}-{prewarm}"}
        wanted = spec(tmp_path, "echo", "on", prewarm=prewarm, **where)
        async with open_session(LocalSandbox(box), wanted) as session:
            if prewarm and settled:
                await is_warm(session)
            result = await session.invoke(wanted.request("p"))
        assert (result.outcome, result.gaps) == (Outcome.COMPLETED, [])
        kinds.append([event.kind for event in read_events(result.evidence)])
    assert kinds[0] == kinds[1]
    assert remains(box) == []


async def test_what_waited_pushes_its_evidence_where_the_request_says(tmp_path: Path, box: Path) -> None:
    """The agent stays long enough for a second reply: the first is always asked for."""
    wanted = spec(tmp_path, "sh", "-c", "for i in 1 2 3 4 5; do echo $i; sleep 0.2; done")
    notes: list[str] = []
    async with (
        listening("http://127.0.0.1:0") as sink,
        open_session(LocalSandbox(box), wanted, sink=sink, on_note=notes.append) as session,
    ):
        await is_warm(session)
        result = await session.invoke(wanted.request("p"))
    assert (result.outcome, result.gaps) == (Outcome.COMPLETED, [])
    assert "the box's evidence is pushed" in notes
    assert pids_below(wanted.session_id) == []


async def test_request_that_is_not_the_specs_is_run_as_it_is(tmp_path: Path, box: Path) -> None:
    wanted = spec(tmp_path, "echo", "one")
    async with open_session(LocalSandbox(box), wanted) as session:
        await is_warm(session)
        result = await session.invoke(replace(wanted.request("p"), argv=["echo", "two"]))
    said = [event.data["text"] for event in read_events(result.evidence) if event.kind == "log"]
    assert (result.outcome, said) == (Outcome.COMPLETED, ["two"])


async def test_another_ones_session_is_not_stopped_by_a_close_without_a_request(tmp_path: Path, box: Path) -> None:
    """Neither one that runs nor one that waits, nor one that took the place of what this one had started early."""
    wanted = spec(tmp_path, "sh", "-c", "echo on; exec sleep 600")
    early = Session(LocalSandbox(box), replace(wanted, out=tmp_path / "early", env={"EARLY": "1"}))
    await early.open()
    await is_warm(early)
    async with open_session(LocalSandbox(box), wanted) as first:
        async with open_session(LocalSandbox(box), replace(wanted, out=tmp_path / "second")):
            pass
        await is_warm(first)
        invoked = asyncio.create_task(first.invoke(wanted.request("p")))
        await asyncio.to_thread(eventually, lambda: first.collector.events >= 2)
        async with open_session(LocalSandbox(box), replace(wanted, out=tmp_path / "third")):
            pass
        await early.close()
        assert not invoked.done()
        assert pids_below(f"BOXSTRAP_SESSION={wanted.session_id}")
    assert (await invoked).outcome is Outcome.CANCELLED
    assert remains(box) == []


@pytest.mark.parametrize("killed", [False, True])
async def test_agent_has_imported_before_it_is_asked(tmp_path: Path, box: Path, killed: bool) -> None:
    """NOOA for real: its import is over before the request is there, in a repository that was put there afterwards.

    One that was killed while it waited is started again.
    """
    repo = tmp_path / "bills"
    make_sample_repo(repo)
    with ScriptedModel() as model:
        wanted = spec(tmp_path, agent="nooa", workdir=str(repo), model=Model(url=model.url, name="scripted"), loopback_ok=True)
        async with open_session(LocalSandbox(box), wanted) as session:
            await is_warm(session)
            agent = await asyncio.to_thread(eventually, lambda: waiting_driver(wanted.session_id))
            if killed:
                os.kill(agent, signal.SIGKILL)
            repo.rename(tmp_path / "moved")
            make_sample_repo(repo)
            result = await session.invoke(wanted.request(PROMPT))
        assert len(model.calls) == 4
    assert (result.outcome, result.gaps) == (Outcome.COMPLETED, [])
    started = next(event for event in read_events(result.evidence) if event.kind == "agent_started")
    assert (started.data["pid"] == agent) is not killed
    assert (changed(repo), changed(tmp_path / "moved")) == (b" M bills/split.py\n", b"")
    assert pids_below(wanted.session_id) == []


def changed(repo: Path) -> bytes:
    """Print what git says was changed."""
    return subprocess.check_output(["git", "-C", str(repo), "status", "--porcelain", "--ignored"])


def waiting_driver(session_id: str) -> int:
    """Find the driver that has imported its agent and reads its standard input."""
    for pid in pids_below(f"BOXSTRAP_SESSION={session_id}"):
        command = (Path("/proc") / str(pid) / "cmdline").read_bytes()
        if b"nooa_driver" in command and b"nooa" in (Path("/proc") / str(pid) / "maps").read_bytes():
            waits = (Path("/proc") / str(pid) / "wchan").read_text()
            return pid if "pipe" in waits else 0
    return 0
