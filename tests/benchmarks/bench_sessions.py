# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""N sessions at once on one controller, in one container: its CPU, its memory, and how both grow with N.

Their evidence is pulled by held execs, or pushed to one sink of the controller. Each agent prints a line every half second for
SECONDS seconds. What the agents and the engine themselves cost on the same two cores is in the wall time, not in the
controller's CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import docker
from containers import Box, Containers, internal_network
from rich.console import Console
from rich.table import Table

from boxstrap.controller.listening import listening
from boxstrap.controller.sandboxes.docker import DockerSandbox
from boxstrap.controller.session import SessionSpec, open_session
from boxstrap.controller.sink import Sink
from boxstrap.runner.wire import Outcome

SECONDS = 10
COUNTS = (1, 8, 32, 64)
SCRIPT = f"i=0; while [ $i -lt {SECONDS * 2} ]; do i=$((i+1)); echo line $i; sleep 0.5; done"


async def sessions(container: str, count: int, folder: Path, push_to: str) -> None:
    """Run `count` sessions at once; all have to complete."""

    async def one(number: int, sink: Sink | None) -> Outcome:
        name = f"n{count}-{number}"
        spec = SessionSpec(session_id=name, agent="command", workdir="/", out=folder / name, argv=["sh", "-c", SCRIPT])
        async with open_session(DockerSandbox(container), spec, sink=sink) as session:
            result = await session.invoke(spec.request("p"))
        assert not result.gaps
        return result.outcome

    async with listening(push_to) if push_to else contextlib.nullcontext() as sink:
        outcomes = await asyncio.gather(*(one(number, sink) for number in range(count)))
    assert set(outcomes) == {Outcome.COMPLETED}


def controller(container: str, count: int, push_to: str) -> None:
    """Be the controller process of one measurement: print wall seconds, CPU seconds, peak MiB."""
    with tempfile.TemporaryDirectory() as folder:
        begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        asyncio.run(sessions(container, count, Path(folder), push_to))
        after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    sys.stdout.write(f"{time.monotonic() - begun} {cpu} {after.ru_maxrss / 1024}\n")


def main() -> None:
    """Measure each N in a process of its own, so that peaks do not add up."""
    table = Table(
        "way", "sessions", "wall, s", "over the agents' own, s", "controller CPU, s", "CPU per session, s", "peak RSS, MiB"
    )
    engine = docker.from_env(timeout=600)
    boxes = Containers(engine, tag_of=lambda name: name)
    with internal_network(engine) as network:
        try:
            box: Box = boxes("boxstrap/debian:12", network=network.name)
            measure(box, 1)  # installs
            for way, push_to in (("pulled", ""), ("pushed", f"http://{network.host}:0")):
                for count in COUNTS:
                    wall, cpu, peak = measure(box, count, push_to)
                    row = (f"{wall:.1f}", f"{wall - SECONDS:.1f}", f"{cpu:.2f}", f"{cpu / count:.3f}", f"{peak:.0f}")
                    table.add_row(way, str(count), *row)
        finally:
            boxes.remove()
    Console(width=120).print(table)


def measure(box: Box, count: int, push_to: str = "") -> tuple[float, float, float]:
    """Run one controller process."""
    argv = [sys.executable, __file__, box.id, str(count), push_to]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, env=dict(os.environ))
    wall, cpu, peak = (float(word) for word in done.stdout.split())
    return wall, cpu, peak


if __name__ == "__main__":
    if len(sys.argv) == 4:
        controller(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    else:
        main()
