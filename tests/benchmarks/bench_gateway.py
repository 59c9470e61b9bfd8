# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What the gateway costs: 32 calls in flight against a model that answers in 500 ms, beside the same calls without it.

Direct calls and calls through the gateway alternate, so that a busy machine is busy for both. Calls spread over time are what
agents do; all at the same instant is the worst that they can do to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from boxstrap.runner.gateway_process import GatewayProcess
from boxstrap.runner.layout import SessionPaths
from boxstrap.runner.wire import Model, Request

IN_FLIGHT = 32
ROUNDS = 4
MODEL_S = 0.5
BODY = json.dumps({"model": "m", "input": [{"role": "user", "content": "x" * 25_000}]}).encode()
"""About the size of an agent's first request."""


def main() -> None:
    """Measure and print."""
    console = Console()
    with slow_model(MODEL_S) as url, gateway(url) as (near, pid):
        for title, spread_s in (("spread over time", MODEL_S), ("all at the same instant", 0.0)):
            ways = {"direct": url, "gateway": near}
            console.print(
                compare(f"{IN_FLIGHT} calls in flight, {title}; the model takes {MODEL_S * 1e3:g} ms", ways, spread_s=spread_s)
            )
        peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    console.print(f"peak memory of the gateway: {int(peak[1]) / 1024 if peak else 0:.1f} MiB")


def compare(title: str, ways: dict[str, str], *, spread_s: float, in_flight: int = IN_FLIGHT, rounds: int = ROUNDS) -> Table:
    """Call by each way in turn, and say what each adds to the first."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, url in ways.items():
            times[name] += asyncio.run(calls(url, in_flight, spread_s=spread_s))
    return told(title, times)


def told(title: str, times: dict[str, list[float]]) -> Table:
    """Put times (seconds by way) into a table; the first way is what the others are held against."""
    table = Table("calls", "n", "p50, ms", "p99, ms", "added p50, ms", "added p99, ms", title=title, title_justify="left")
    base = next(iter(times))
    for name, seconds in times.items():
        own = [at(seconds, percent) * 1e3 for percent in (50, 99)]
        added = (
            []
            if name == base
            else [f"{mine - at(times[base], part) * 1e3:.1f}" for mine, part in zip(own, (50, 99), strict=True)]
        )
        table.add_row(name, str(len(seconds)), *(f"{mine:.1f}" for mine in own), *added)
    return table


def at(seconds: Sequence[float], percent: int) -> float:
    """Give a percentile."""
    return statistics.quantiles(seconds, n=100)[percent - 1]


async def calls(url: str, count: int, *, spread_s: float, each: int = 6) -> list[float]:
    """Keep `count` calls in flight, `each` on every connection; give the seconds of all but each connection's first."""
    parts = urlsplit(url)
    head = f"POST {parts.path}/responses HTTP/1.1\r\nhost: m\r\ncontent-type: application/json\r\n"
    asked = f"{head}content-length: {len(BODY)}\r\n\r\n".encode() + BODY

    async def one(number: int) -> list[float]:
        await asyncio.sleep(spread_s * number / count)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        seconds = []
        for _ in range(each):
            begun = time.perf_counter()
            writer.write(asked)
            answered = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", answered)
            await reader.readexactly(int(length[1]) if length else 0)
            seconds.append(time.perf_counter() - begun)
        writer.close()
        return seconds[1:]

    return [second for some in await asyncio.gather(*(one(number) for number in range(count))) for second in some]


@contextlib.contextmanager
def slow_model(seconds: float, bind: str = "127.0.0.1") -> Iterator[str]:
    """Run the model server in a process of its own, and give its URL."""
    script = Path(__file__).with_name("slow_model.py")
    process = subprocess.Popen([sys.executable, str(script), str(seconds), bind], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def gateway(url: str) -> Iterator[tuple[str, int]]:
    """Run a gateway before that model, its events read by another process, as a supervisor's are; give its URL and its pid."""
    with tempfile.TemporaryDirectory() as folder:
        request = Request(session_id="bench", agent="command", workdir="/", prompt="")
        started = GatewayProcess(
            request, Model(url=url, name="m"), SessionPaths(folder), {"PATH": os.environ["PATH"]}, lambda kind, data: None
        )
        os.set_blocking(started.pump.fd, True)
        reader = subprocess.Popen(["cat"], stdin=started.pump.fd, stdout=subprocess.DEVNULL)
        try:
            yield started.model.url, started.pid
        finally:
            started.hang_up()
            reader.wait()
            os.waitpid(started.pid, 0)


if __name__ == "__main__":
    main()
