# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What a call of a tool server costs the agent: directly from a box, and relayed by the controller for a box without a network.

The server answers at once. Seconds are those of the resource_call events: arguments checked, sent, served, answered.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path

import containers
import docker
from counter_server import CounterServer
from rich.console import Console
from rich.table import Table
from scripted_model import ScriptedModel

from boxstrap.controller.collect import read_events
from boxstrap.controller.sandboxes.docker import DockerSandbox
from boxstrap.controller.session import SessionSpec, open_session
from boxstrap.runner.wire import Kind, Model, Outcome

CALLS = 200


def main() -> None:
    """Measure and print."""
    engine = docker.from_env()
    boxes = containers.Containers(engine, tag_of=lambda name: f"boxstrap/{name}")
    told = Table(
        "way", "calls", "p50, ms", "p90, ms", "p99, ms", title=f"{CALLS} calls of a function, one by one", title_justify="left"
    )
    try:
        with containers.internal_network(engine) as network:
            for upstream in ("direct", "relay"):
                host, name = (network.host, network.name) if upstream == "direct" else ("127.0.0.1", "none")
                seconds = asyncio.run(session(boxes("task", network=name).id, host, upstream))
                cuts = statistics.quantiles(seconds, n=100)
                told.add_row(upstream, str(len(seconds)), *(f"{cuts[at] * 1e3:.1f}" for at in (49, 89, 98)))
            boxes.remove()
    finally:
        boxes.remove()
    Console().print(told)


async def session(box: str, host: str, upstream: str) -> list[float]:
    """Run one session and return the seconds of its calls."""
    with (
        ScriptedModel(bind=host) as model,
        CounterServer(bind=host, takes_s=0.0) as counter,
        tempfile.TemporaryDirectory() as out,
    ):
        spec = SessionSpec(
            session_id=upstream,
            agent="nooa",
            workdir="/tmp",
            out=Path(out),
            model=Model(url=model.url, name=f"count-fast:{CALLS}"),
            upstream=upstream,
            tool_accesses=[counter.access()],
        )
        async with open_session(DockerSandbox(box), spec) as opened:
            result = await opened.invoke(spec.request("Count."))
        if result.outcome is not Outcome.COMPLETED:
            raise SystemExit(f"{upstream}: {result.outcome}: {result.detail}")
        calls = [event.data for event in read_events(result.evidence) if event.kind == Kind.RESOURCE_CALL]
        return [float(str(call["seconds"])) for call in calls if call["status"] == "completed"]


if __name__ == "__main__":
    main()
