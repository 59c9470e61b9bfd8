# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Cold and warm start, side by side in fresh containers of one image: seconds until the agent's first model request.

boxstrap against pip inside the sandbox, with the same lean lock and with the full one that plain pip resolves to, and
against the bare limit: copying the same compressed bytes in and unpacking them. Medians of ROUNDS, taken in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import docker
from containers import Box, Containers, InternalNetwork, internal_network
from docker.errors import ImageNotFound
from rich.console import Console
from rich.table import Table
from sample_repo import PROMPT, make_sample_repo
from scripted_model import ScriptedModel

from boxstrap.controller import artifacts
from boxstrap.controller.sandboxes.docker import DockerSandbox
from boxstrap.controller.session import SessionSpec, open_session
from boxstrap.runner.wire import Model

ROUNDS = int(os.environ.get("BOXSTRAP_ROUNDS", "3"))
CALLER_BUSY_S = 3.0
"""Between open and invoke of a prewarmed session: a dataset row is fetched, a seed is set."""
REQUIREMENTS = Path(__file__).parents[2] / "requirements"
CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
CA_IN_BOX = "/ca-of-the-host.crt"
PIP_IMAGE = "boxstrap-bench/pip:latest"
IMPORT = "python3 -c 'import nooa_bench.bench_agent'"


class Bench:
    """The containers and the numbers."""

    def __init__(self, client: docker.DockerClient, network: InternalNetwork, folder: Path) -> None:
        self.boxes = Containers(client, tag_of=lambda name: name)
        self.network = network
        self.folder = folder
        self.seconds: dict[str, list[float]] = {}
        make_sample_repo(folder / "bills")

    def note(self, name: str, seconds: float) -> None:
        """Keep one number."""
        self.seconds.setdefault(name, []).append(seconds)

    def boxstrap(self, number: int) -> None:
        """Run a cold session, a warm one and a prewarmed one, in one fresh container without a way out."""
        box = self.boxes("boxstrap/task13", network=self.network.name)
        box.put(self.folder / "bills", "/work/bills")
        for name in ("cold", "warm", "prewarmed, from invoke on"):
            with ScriptedModel(bind=self.network.host) as model:
                spec = SessionSpec(
                    session_id=f"{name.partition(',')[0]}-{number}",
                    agent="nooa",
                    workdir="/work/bills",
                    out=self.folder / f"{name}-{number}",
                    model=Model(url=model.url, name="scripted"),
                    prewarm=name not in {"cold", "warm"},
                )
                begun = asyncio.run(self._session(DockerSandbox(box.id), spec))
                self.note(f"boxstrap, {name}", model.calls[0].at - begun)
        imported = time.monotonic()
        runtime = box.check("ls -d /opt/nemo-gym-nooa/*/python").removesuffix("/python")
        code = f"import sys; sys.path.insert(0, {runtime + '/site'!r}); import nooa_bench.bench_agent"
        box.check([f"{runtime}/python/bin/python3", "-I", "-c", code])
        self.note("bare: docker exec + import of the agent", time.monotonic() - imported)
        box.remove()

    async def _session(self, sandbox: DockerSandbox, spec: SessionSpec) -> float:
        """Give the moment from which its start counts: before open, or before invoke where open went ahead."""
        begun = time.time()
        async with open_session(sandbox, spec) as session:
            if spec.prewarm:
                await asyncio.sleep(CALLER_BUSY_S)
                begun = time.time()
            await session.invoke(spec.request(PROMPT))
        return begun

    def bare(self) -> None:
        """Copy the same compressed bytes in and unpack them: what nobody can beat with these bytes."""
        interpreter = artifacts.interpreter(arch=artifacts.host_arch())
        payload = artifacts.payload("nooa", interpreter=interpreter)
        assert payload is not None
        box = self.boxes("boxstrap/task13", network="none")
        begun = time.monotonic()
        for path in (interpreter.path, payload.path):
            box.put(path, f"/p/{path.name}")
            box.check(f"mkdir -p /q/{path.name} && tar -xzf /p/{path.name} -C /q/{path.name}")
        self.note("bare: docker cp + tar of the same bytes", time.monotonic() - begun)
        box.remove()

    def pip(self, image: str, lock: str) -> None:
        """Do what peers do: pip install in the sandbox, with a network, then import."""
        box = self.boxes(image, volumes=[f"{CA_BUNDLE}:{CA_IN_BOX}:ro"])
        box.put(REQUIREMENTS / lock, f"/tmp/{lock}")
        begun = time.monotonic()
        environment = {"PIP_CERT": CA_IN_BOX, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        no_deps = "--no-deps" if "lean" in lock else ""
        install = f"python3 -m venv /opt/agent && /opt/agent/bin/pip install -q --require-hashes {no_deps} -r /tmp/{lock}"
        box.check(install, env=environment)
        if "full" in lock:
            box.check(f"/opt/agent/bin/{IMPORT}")
        self.note(f"pip install of {lock} in the sandbox{' + import' if 'full' in lock else ''}", time.monotonic() - begun)
        box.remove()


def box_with_pip(bench: Bench) -> str:
    """Make the image that peers need: the same one with pip and venv."""
    box: Box = bench.boxes("boxstrap/task13")
    box.check("apt-get -qq update && apt-get -qq install -y --no-install-recommends python3-pip python3-venv >/dev/null")
    box.container.commit(*PIP_IMAGE.split(":"))
    box.remove()
    return PIP_IMAGE


def main() -> None:
    """Run the rounds in turn and print the table."""
    client = docker.from_env(timeout=600)
    with tempfile.TemporaryDirectory() as folder, internal_network(client) as network:
        bench = Bench(client, network, Path(folder))
        try:
            image = box_with_pip(bench)
            for number in range(ROUNDS):
                bench.boxstrap(number)
                bench.bare()
                bench.pip(image, "nooa-lean.txt")
                bench.pip(image, "nooa-full.txt")
        finally:
            bench.boxes.remove()
            with contextlib.suppress(ImageNotFound):
                client.images.remove(PIP_IMAGE, force=True)
    cold = statistics.median(bench.seconds["boxstrap, cold"])
    table = Table(
        "way", "median, s", "least, s", "most, s", "ratio to cold boxstrap", title="Seconds to the first model request"
    )
    for name, seconds in bench.seconds.items():
        middle = statistics.median(seconds)
        table.add_row(name, f"{middle:.2f}", f"{min(seconds):.2f}", f"{max(seconds):.2f}", f"{middle / cold:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
