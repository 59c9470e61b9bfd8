# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Evidence from a container: seconds from an event's writing to the controller's callback, and events a second.

Pulled by a held exec, and pushed to a sink of this host. Beside them, what `docker exec` with a held stream gives for the same
lines: the fastest way there is, which loses its end at a cut. Host and container share one clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
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
from boxstrap.runner.wire import Event

SLOW = "i=0; while [ $i -lt 200 ]; do i=$((i+1)); date +%s.%N; sleep 0.02; done"
FAST_LINES = 50_000
LINE = "a line of evidence as an agent may print it, about one hundred and twenty characters long with words in it"
FAST = f"yes '{LINE}' | head -n {FAST_LINES}"


async def through_boxstrap(box: Box, folder: Path, name: str, script: str, push_to: str = "") -> tuple[list[float], float]:
    """Return the latency of each log line whose text is a time, and the seconds of the whole invocation."""
    latencies: list[float] = []

    def on_event(event: Event) -> None:
        if event.kind == "log":
            text = str(event.data["text"])
            latencies.append(time.time() - float(text) if text[0].isdigit() else 0.0)

    spec = SessionSpec(
        session_id=name,
        agent="command",
        workdir="/tmp",
        out=folder / name,
        argv=["sh", "-c", script],
    )
    notes: list[str] = []
    async with (
        listening(push_to) if push_to else contextlib.nullcontext() as sink,
        open_session(DockerSandbox(box.id), spec, sink=sink, on_event=on_event, on_note=notes.append) as session,
    ):
        begun = time.monotonic()
        result = await session.invoke(spec.request("p"))
        seconds = time.monotonic() - begun
    assert not result.gaps
    assert not push_to or [note for note in notes if "evidence" in note] == ["the box's evidence is pushed"]
    return latencies, seconds


def through_exec(box: Box, script: str) -> tuple[list[float], float]:
    """Do the same over a held exec stream."""
    client = box.container.client
    assert client is not None
    begun = time.monotonic()
    started = client.api.exec_create(box.id, ["sh", "-c", script])["Id"]
    latencies: list[float] = []
    rest = b""
    for chunk in client.api.exec_start(started, stream=True):
        *lines, rest = (rest + chunk).split(b"\n")
        latencies += [time.time() - float(line) if line[:1].isdigit() else 0.0 for line in lines]
    return latencies, time.monotonic() - begun


def main() -> None:
    """Print the table."""
    table = Table("way", "latency p50, ms", "p99, ms", "events/s", title="Evidence")
    engine = docker.from_env(timeout=600)
    boxes = Containers(engine, tag_of=lambda name: name)
    try:
        with tempfile.TemporaryDirectory() as folder, internal_network(engine) as network:
            box = boxes("boxstrap/debian:12", network=network.name)
            asyncio.run(through_boxstrap(box, Path(folder), "warm-up", "true"))
            for way, push_to in (("pulled", ""), ("pushed", f"http://{network.host}:0")):
                slow, _ = asyncio.run(through_boxstrap(box, Path(folder), f"slow-{way}", SLOW, push_to))
                fast, seconds = asyncio.run(through_boxstrap(box, Path(folder), f"fast-{way}", FAST, push_to))
                row(table, f"boxstrap ({way})", slow, fast, seconds)
            slow, _ = through_exec(box, SLOW)
            fast, seconds = through_exec(box, FAST)
            row(table, "held exec stream, nothing kept", slow, fast, seconds)
    finally:
        boxes.remove()
    Console(width=120).print(table)


def row(table: Table, name: str, slow: list[float], fast: list[float], seconds: float) -> None:
    """Add one way."""
    cuts = statistics.quantiles(slow, n=100)
    table.add_row(name, f"{cuts[49] * 1000:.0f}", f"{cuts[98] * 1000:.0f}", f"{len(fast) / seconds:,.0f}")


if __name__ == "__main__":
    main()
