# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What a relayed model call costs over docker, beside a direct one: by a held exec, and by plain exec calls.

One container, three sessions; the agent in it makes one call after the other and times them itself. What one exec costs on this
machine at this time is said below: over plain execs a call waits for about one.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import containers
import docker
from bench_gateway import at, slow_model, told
from plain_sandbox import Plain
from rich.console import Console

from boxstrap.controller.collect import read_events
from boxstrap.controller.sandbox import Sandbox
from boxstrap.controller.sandboxes.docker import DockerSandbox
from boxstrap.controller.session import SessionSpec, open_session
from boxstrap.runner.wire import Model

CALLS = 24
MODEL_S = 0.5
AGENT = f"""
import json, os, time, urllib.request
body = json.dumps({{"model": "m", "input": "x" * 25000}}).encode()
for number in range({CALLS}):
    asked = urllib.request.Request(os.environ["BOXSTRAP_MODEL_URL"] + "/responses", body + b" " * number)
    begun = time.perf_counter()
    urllib.request.urlopen(asked).read()
    print(time.perf_counter() - begun, flush=True)
"""


def main() -> None:
    """Measure and print."""
    client = docker.from_env(timeout=120)
    subprocess.run([sys.executable, str(Path(__file__).parents[2] / "images" / "build.py"), "task"], check=True)
    boxes = containers.Containers(client, tag_of=lambda name: f"boxstrap/{name}")
    try:
        with containers.internal_network(client) as network, slow_model(MODEL_S, network.host) as url:
            box = boxes("task", network=network.name)
            held = DockerSandbox(box.id)
            ways: dict[str, tuple[Sandbox, str]] = {
                "direct": (held, "direct"),
                "relay, held exec": (held, "relay"),
                "relay, plain execs": (Plain(held), "relay"),
            }
            execs = asyncio.run(empty_execs(held))
            times = {name: asyncio.run(one(sandbox, upstream, url)) for name, (sandbox, upstream) in ways.items()}
            boxes.remove()
    finally:
        boxes.remove()
    console = Console()
    console.print(told(f"calls one after the other from a container; the model takes {MODEL_S * 1e3:g} ms", times))
    console.print(f"an exec of `true` in that container: p50 {at(execs, 50) * 1e3:.0f} ms, p99 {at(execs, 99) * 1e3:.0f} ms")


async def empty_execs(sandbox: DockerSandbox) -> list[float]:
    """Time execs that do nothing."""
    seconds = []
    for _ in range(20):
        begun = time.perf_counter()
        await sandbox.exec("true")
        seconds.append(time.perf_counter() - begun)
    return seconds


async def one(sandbox: Sandbox, upstream: str, url: str) -> list[float]:
    """Run one session and give the seconds of its calls, the first one left out."""
    with tempfile.TemporaryDirectory() as folder:
        spec = SessionSpec(
            session_id=f"bench-{upstream}-{type(sandbox).__name__}",
            agent="command",
            workdir="/",
            out=Path(folder, "out"),
            model=Model(url=url, name="m"),
            upstream=upstream,
            argv=["python3", "-c", AGENT],
        )
        async with open_session(sandbox, spec) as session:
            result = await session.invoke(spec.request(""))
        lines = [event.data for event in read_events(result.evidence) if event.kind == "log"]
        return [float(str(line["text"])) for line in lines if line.get("stream") == "stdout"][1:]


if __name__ == "__main__":
    main()
