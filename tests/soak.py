# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Kills everything, at random moments, and counts what is lost and what is left. `./build.sh soak --kills 300 [--seed N]`.

Rounds of sessions share a container that reaches this host and nothing else. Each agent writes numbered lines and leaves
daemons of every kind; the evidence of some is pushed, that of others pulled. Meanwhile agents, supervisors, watchdogs,
interpreters, controllers, sinks, the container and the line to the engine are killed.
`written` is what the box's own disk holds when a session is about to be removed, read by the engine and not by the
collector; `left` comes from the engine's own list of processes; the agent's side file is a second witness of what it wrote.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import docker
import soak_agent
from containers import Box, Containers, internal_network
from cut_line import CutLine
from docker.errors import APIError, NotFound
from polling import eventually
from sink_line import SinkLine, cut_sink

from boxstrap.controller.budgets import Budgets
from boxstrap.controller.collect import read_events
from boxstrap.controller.errors import BoxstrapError
from boxstrap.controller.sandboxes.docker import DockerSandbox
from boxstrap.controller.sandboxes.output import Output
from boxstrap.controller.session import Result, SessionSpec, open_session
from boxstrap.runner.wire import Event, Outcome

SESSIONS_A_ROUND = 5
ROOT = "/tmp/nemo-gym-command"  # in the box
GOOD = {Outcome.COMPLETED}
LOST = {Outcome.SANDBOX_LOST}


@dataclass
class Tally:
    """What the last line says, and what went wrong besides."""

    kills: int = 0
    sessions: int = 0
    written: int = 0
    collected: int = 0
    lost: int = 0
    duplicated: int = 0
    left: int = 0
    outside: int = 0
    wrong: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)

    def blame(self, text: str) -> None:
        """Note what should not be, and say it at once."""
        self.wrong.append(text)
        print(f"soak: {text}", file=sys.stderr, flush=True)

    def line(self) -> str:
        """Say it in one line."""
        names = ("kills", "sessions", "written", "collected", "lost", "duplicated", "left", "outside")
        return " ".join(f"{name}={getattr(self, name)}" for name in names)


class Witness(DockerSandbox):
    """A container whose evidence is copied by the engine at the last moment: before the session's folder is removed."""

    def __init__(self, box: str, client: docker.DockerClient, engine: docker.DockerClient, folder: Path) -> None:
        super().__init__(box, client=client)
        self._engine = engine
        self._id = box
        self._folder = folder

    async def exec(self, command: str, **how: Any) -> Output:
        """Look before a removal."""
        if "--remove" in command:
            name = command.partition(f"{ROOT}/")[2].partition(" ")[0]
            seen = await asyncio.to_thread(from_disk, self._engine, self._id, f"{ROOT}/{name}/evidence.ndjson")
            if seen is not None:
                (self._folder / name).write_bytes(seen)
        return await super().exec(command, **how)


def from_disk(engine: docker.DockerClient, box: str, path: str) -> bytes | None:
    """Read a file of a container in any state, through the engine's archive call."""
    try:
        chunks, _ = engine.api.get_archive(box, path)
        with tarfile.open(fileobj=BytesIO(b"".join(chunks))) as tar:
            file = tar.extractfile(tar.getmembers()[0])
            return file.read() if file is not None else None
    except (NotFound, APIError):
        return None


@dataclass
class Plan:
    """One session: what its agent does, and at which address of this host its box reaches a sink, if it is to push."""

    name: str
    lines: int
    base: Path
    box: str
    line: str
    push: str = ""
    sink_line: SinkLine | None = None
    killed: set[str] = field(default_factory=set)
    delivered: Counter[int] = field(default_factory=Counter)

    @property
    def out(self) -> Path:
        """The host's folder for it."""
        return self.base / "sessions" / self.name

    def spec(self) -> SessionSpec:
        """Say what the session is."""
        argv = ["sh", soak_agent.PATH, self.name, str(self.lines)]
        budgets = Budgets().with_worker(90.0)
        return SessionSpec(session_id=self.name, agent="command", workdir="/work", out=self.out, argv=argv, budgets=budgets)


async def drive(plan: Plan) -> Result | None:
    """Be the controller of one session, from open to close."""
    client = docker.DockerClient(base_url=plan.line, timeout=20)
    engine = docker.from_env(timeout=60)

    def delivered(event: Event) -> None:
        plan.delivered[event.seq] += 1

    sandbox = Witness(plan.box, client, engine, plan.base / "seen")
    try:
        async with contextlib.AsyncExitStack() as stack:
            sink = None
            if plan.push:
                sink, plan.sink_line = await stack.enter_async_context(cut_sink(plan.push))
            session = await stack.enter_async_context(open_session(sandbox, plan.spec(), sink=sink, on_event=delivered))
            if plan.lines % 2:  # what is started early has the time to be ready
                await started_early(plan, engine)
            await session.invoke(plan.spec().request("p"))
        return session.result
    finally:
        plan.sink_line = None
        client.close()
        engine.close()


async def started_early(plan: Plan, engine: docker.DockerClient) -> None:
    """Wait until a supervisor waits in the box, within a bound: the box may be away."""
    path = f"{ROOT}/{plan.name}/supervisor.json"
    with contextlib.suppress(AssertionError):
        await asyncio.to_thread(eventually, lambda: from_disk(engine, plan.box, path), within_s=3)


def freeze(pid: int, *, frozen: bool) -> None:
    """Freeze or thaw a container where the engine cannot: an exec that was starting when it froze holds the engine's lock."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for file, word in (
            (
                f"/sys/fs/cgroup/freezer{path}/freezer.state" if controllers == "freezer" else "",
                "FROZEN" if frozen else "THAWED",
            ),
            (f"/sys/fs/cgroup{path}/cgroup.freeze" if not controllers else "", str(int(frozen))),
        ):
            if file and Path(file).exists():
                Path(file).write_text(word)


async def begun(plan: Plan) -> None:
    """Wait until evidence arrives, within a bound: what is killed then is a session and not its installation."""
    path = plan.out / "evidence.ndjson"
    with contextlib.suppress(AssertionError):
        await asyncio.to_thread(eventually, lambda: path.exists() and path.stat().st_size, within_s=30)


class Killer:
    """The kinds of kills; each says in a word whether the session, or all of the round, may end as lost."""

    def __init__(self, engine: docker.DockerClient, box: Box, line: CutLine) -> None:
        self.engine, self.box, self.line = engine, box, line

    def inside(self, plan: Plan, what: str) -> bool:
        """Kill something of one session; False when it was not there."""
        with contextlib.suppress(APIError):
            return self.box.exec(["sh", soak_agent.KILL, what, f"{ROOT}/{plan.name}"]).code == 0
        return False

    async def outside(self, what: str, pause_s: float) -> bool:
        """Do something to the container or to the line, and undo it; False when the engine would not."""
        if what == "cut":
            self.line.cut()
            await asyncio.sleep(pause_s)
            self.line.mend()
        elif what == "pause":
            pid = int(self.engine.api.inspect_container(self.box.id)["State"]["Pid"])
            try:
                await asyncio.to_thread(self.box.pause)
            except APIError:  # runc gives up freezing a box that is busy
                return False
            await asyncio.sleep(pause_s)
            unpausing = asyncio.ensure_future(asyncio.to_thread(self.box.unpause))
            await asyncio.wait({unpausing}, timeout=3)
            if not unpausing.done():
                freeze(pid, frozen=False)
            try:
                await unpausing
            except APIError:  # it found nothing to thaw, and still takes the container for paused
                freeze(pid, frozen=True)
                await asyncio.to_thread(self.box.unpause)
        elif what == "docker-restart":
            await asyncio.to_thread(self.box.restart)
        else:
            await asyncio.to_thread(self.box.kill)
            await asyncio.sleep(pause_s)
            await asyncio.to_thread(self.box.container.start)
        return True


INSIDE = {
    "agent": {Outcome.AGENT_FAILED, *GOOD},
    "supervisor": {*LOST, *GOOD},
    "watchdog": GOOD,
    "both": {*LOST, *GOOD},
    "pythons": {*LOST, *GOOD},
    "stop-supervisor": GOOD,
    "stop-both": GOOD | {Outcome.DEADLINE_EXCEEDED, *LOST},
    "daemon": GOOD,
    "tail": GOOD,
}
BOX_WIDE = {"pythons"}
"""What is done for one session and meets all that run in its box."""
OUTSIDE = ("cut", "pause", "docker-restart", "docker-kill")
SINK = ("sink", "answers")
"""What is done to the sink of one session: it is away for a moment, or what it answers is lost."""


class Soak:
    """The whole run."""

    def __init__(
        self, *, kills: int, seed: int, base: Path, box: Box, engine: docker.DockerClient, line: CutLine, host: str
    ) -> None:
        self.host = host
        self.wanted, self.base, self.box, self.engine, self.line = kills, base, box, engine, line
        self.random = random.Random(seed)
        self.killer = Killer(engine, box, line)
        self.tally = Tally()

    async def run(self) -> Tally:
        """Round after round, until there were enough kills."""
        number = 0
        while self.tally.kills < self.wanted:
            number += 1
            await self.round(number)
        return self.tally

    async def round(self, number: int) -> None:
        """Some sessions at once, some kills among them, then the reckoning."""
        plans = [self.plan(f"r{number}s{one}") for one in range(SESSIONS_A_ROUND)]
        moves = [self.move(plans) for _ in range(self.random.randint(9, 14))][: self.wanted - self.tally.kills]
        lost_by_box = any(move[1] in OUTSIDE for move in moves)
        tasks = {plan.name: asyncio.create_task(self.controlled(plan, moves)) for plan in plans}
        await asyncio.gather(*(begun(plan) for plan in plans))
        for delay, what, plan, pause_s in moves:
            await asyncio.sleep(delay)
            await self.kill(what, plan, pause_s)
        results = dict(zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True), strict=True))
        if any(plan.killed & BOX_WIDE for plan in plans):
            for plan in plans:
                plan.killed |= BOX_WIDE
        for plan in plans:
            await self.reckon(plan, results[plan.name], lost_by_box=lost_by_box)
        self.count_left(number)

    def plan(self, name: str) -> Plan:
        """Say what one agent writes."""
        push = self.host if self.random.random() < 0.5 else ""
        lines = self.random.randint(40, 160)
        return Plan(name=name, lines=lines, base=self.base, box=self.box.id, line=self.line.url, push=push)

    def move(self, plans: list[Plan]) -> tuple[float, str, Plan, float]:
        """Choose a kill: when, what, whose, and for how long where it is undone."""
        kinds = [*INSIDE, *INSIDE, "controller", "controller", *SINK, *SINK, *OUTSIDE]
        what = self.random.choice(kinds)
        return self.random.uniform(0.0, 0.6), what, self.random.choice(plans), self.random.choice((0.2, 0.5, 1.5, 5.0))

    async def kill(self, what: str, plan: Plan, pause_s: float) -> None:
        """Do one kill, and count it if there was something to kill."""
        if what == "controller":
            return  # its own process does that: see `controlled`
        if what in OUTSIDE:
            done = await self.killer.outside(what, pause_s)
        elif what in SINK:
            done = await self.trouble(plan.sink_line, what, pause_s)
        else:
            done = await asyncio.to_thread(self.killer.inside, plan, what)
        if done:
            plan.killed.add(what)
            self.tally.kills += 1
            self.tally.kinds[what] += 1

    async def trouble(self, line: SinkLine | None, what: str, pause_s: float) -> bool:
        """Take a session's sink away for a moment, or its answers; False when it has none at this moment."""
        if line is None:
            return False
        if what == "answers":
            line.lose(3)
        else:
            line.cut()
            await asyncio.sleep(pause_s)
            line.mend()
        return True

    async def controlled(self, plan: Plan, moves: list[tuple[float, str, Plan, float]]) -> Result | None:
        """Control a session: in this process, after as many killed controllers in processes of their own as are due."""
        for delay, what, whose, _ in moves:
            if what == "controller" and whose is plan:
                argv = [
                    sys.executable,
                    __file__,
                    "--drive",
                    json.dumps([plan.name, plan.lines, str(plan.base), plan.box, plan.line, plan.push]),
                ]
                process = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.DEVNULL)
                await begun(plan)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), delay)
                if process.returncode is None:
                    process.kill()
                    await process.wait()
                    plan.killed.add(what)
                    self.tally.kills += 1
                    self.tally.kinds[what] += 1
        return await drive(plan)

    async def reckon(self, plan: Plan, result: Result | BaseException | None, *, lost_by_box: bool) -> None:
        """Attach again where the box was away at the end, then compare what was written with what was collected."""
        for _ in range(3):
            if not isinstance(result, BoxstrapError) and self.box.exec(["test", "-e", f"{ROOT}/{plan.name}"]).code != 0:
                break
            try:
                result = await drive(plan)
            except BoxstrapError as error:
                result = error
        tally = self.tally
        tally.sessions += 1
        if isinstance(result, BaseException) or result is None:
            tally.blame(f"{plan.name} {sorted(plan.killed)}: {result!r}")
            return
        tally.outcomes[result.outcome.value] += 1
        # A controller that lost its box may still have stopped the session: the next one finds it stopped.
        away = {*LOST, Outcome.CANCELLED} if lost_by_box else set()
        allowed = GOOD.union(*(INSIDE.get(kind, GOOD) for kind in plan.killed), away)
        if result.outcome not in allowed:
            tally.blame(f"{plan.name} {sorted(plan.killed)}: {result.outcome.value}: {result.detail}")
        if "agent" in plan.killed and not lost_by_box and result.receipt and result.receipt.exit_code not in {None, 0}:
            tally.blame(f"{plan.name}: {result.receipt}")
        self.compare(plan, result, kept=not lost_by_box and not plan.killed & {"supervisor", "both", "pythons", "stop-both"})

    def compare(self, plan: Plan, result: Result, *, kept: bool) -> None:
        """Count lines; `kept` says that nothing was killed which had lines of the agent in its hands."""
        tally = self.tally
        seen = self.base / "seen" / plan.name
        written = seen.read_bytes() if seen.exists() else b""
        collected = (plan.out / "evidence.ndjson").read_bytes()
        whole = [line for line in written.split(b"\n")[:-1] if line]
        here = Counter(line for line in collected.split(b"\n")[:-1] if line)
        tally.written += len(whole)
        tally.collected += sum(here.values())
        missing = [line for line in whole if not here[line]]
        tally.lost += len(missing)
        tally.duplicated += sum(here.values()) - len(here) + sum(count - 1 for count in plan.delivered.values())
        torn = len(written.rpartition(b"\n")[2])
        if torn and not any(gap.code == "torn_line" for gap in result.gaps):
            tally.blame(f"{plan.name}: {torn} torn bytes, and no gap says so")
        events = list(read_events(result.evidence))
        if [event.seq for event in events] != list(range(1, len(events) + 1)):
            tally.blame(f"{plan.name}: the numbers have holes, {[gap.code for gap in result.gaps]}")
        texts = {event.data.get("text") for event in events}
        side = from_disk(self.engine, self.box.id, f"/work/side-{plan.name}") or b""
        unseen = [line for line in side.decode().split() if f"line {line}" not in texts]
        if kept:
            tally.lost += len(unseen)
        for event in events:
            digest = event.data.get("artifact")
            if isinstance(digest, str) and not (plan.out / "artifacts" / digest).is_file():
                tally.lost += 1
                tally.blame(f"{plan.name} {sorted(plan.killed)}: no artifact {digest[:16]}; {result.gaps[:3]}")
        if missing or (kept and unseen):
            tally.blame(f"{plan.name} {sorted(plan.killed)}: lost {missing[:2]} {unseen[:5]} {result.gaps[:3]}")

    def count_left(self, number: int) -> None:
        """List the container's processes by the engine, whose own list comes from the host: none but PID 1 may be there.

        A verb of ours that a killed controller had asked for goes by itself; it is none of the agent's.
        """
        listed = self.box.container.top()
        commands = [str(row[listed["Titles"].index("CMD")]) for row in listed["Processes"]]
        left = [line for line in commands if not line.startswith("sleep 2147483647") and "/opt/nemo-gym-command/" not in line]
        self.tally.left += len(left)
        if left:
            self.tally.blame(f"round {number}: left {left}")


@contextlib.contextmanager
def watched(base: Path) -> Iterator[Callable[[], list[str]]]:
    """Make HOME, TMPDIR and the working folder part of `base`; what changes there but for the sessions' own is outside."""
    for name in ("home", "tmp", "work", "sessions", "seen"):
        (base / name).mkdir(parents=True)
    os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # the artifacts are built once
    os.environ |= {"HOME": str(base / "home"), "TMPDIR": str(base / "tmp")}
    os.chdir(base / "work")
    watched_too = [Path("/etc"), base / "home", base / "tmp", base / "work"]

    def look() -> dict[str, tuple[int, int]]:
        found = {}
        for path in (path for root in watched_too for path in root.rglob("*")):
            with contextlib.suppress(OSError):
                about = path.lstat()
                found[str(path)] = (about.st_mtime_ns, about.st_size)
        found |= {str(path): (0, 0) for path in base.iterdir()}
        return found

    before = look()

    def changed() -> list[str]:
        after = look()
        return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))

    yield changed


def main() -> int:
    """Soak, and print the one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=None, help="which moments and kinds are chosen; default: by the clock")
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        name, lines, base, box, line, push = json.loads(options.drive)
        asyncio.run(drive(Plan(name=name, lines=lines, base=Path(base), box=box, line=line, push=push)))
        return 0
    seed = int(time.time()) if options.seed is None else options.seed
    with tempfile.TemporaryDirectory(prefix="boxstrap-soak-") as folder, CutLine(Path(folder)) as line:
        base = Path(folder) / "host"
        engine = docker.from_env(timeout=120)
        boxes = Containers(engine, tag_of=lambda name: f"boxstrap/{name}")
        try:
            with watched(base) as changed, internal_network(engine) as network:
                box = boxes("debian:12", network=network.name)
                soak_agent.put_into(box, Path(folder))
                soak = Soak(kills=options.kills, seed=seed, base=base, box=box, engine=engine, line=line, host=network.host)
                tally = asyncio.run(soak.run())
                outside = changed()
                tally.outside = len(outside)
        finally:
            boxes.remove()
            os.chdir("/")
    for text in outside:
        print(f"soak: changed outside: {text}", file=sys.stderr)
    print(f"soak: seed {seed}; {dict(sorted(tally.kinds.items()))}; {dict(sorted(tally.outcomes.items()))}", file=sys.stderr)
    print(tally.line())
    return 1 if tally.lost or tally.duplicated or tally.left or tally.outside or tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
