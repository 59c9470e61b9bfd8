# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The main job, end to end: the real NOOA BenchAgent fixes a real bug in a sandbox that knew nothing of it a moment ago.

With a Docker engine the sandbox is a bare Debian container on a network that leads nowhere but to the model's address;
without one it is a folder of this machine. The model is a scripted stand-in. It refuses to call a run good that only says so:
the diff, the tests, `git status` and the list of processes are looked at afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import containers
import docker
from docker.errors import DockerException
from rich.console import Console
from rich.table import Table
from rich.text import Text
from sample_repo import PROMPT, make_sample_repo
from scripted_model import ScriptedModel

from boxstrap.controller import artifacts
from boxstrap.controller.errors import BoxstrapError
from boxstrap.controller.sandbox import Sandbox
from boxstrap.controller.sandboxes.docker import DockerSandbox
from boxstrap.controller.sandboxes.local import LocalSandbox
from boxstrap.controller.session import Result, SessionSpec, open_session
from boxstrap.controller.show import Progress, show_result
from boxstrap.runner.wire import Model, Outcome

IMAGE = "task"
CONSOLE = Console(highlight=False, markup=False)


class Look(Protocol):
    """Runs a command in the sandbox as its owner would, past boxstrap."""

    def __call__(self, command: str) -> tuple[int, str]:
        """Return its exit status and stdout."""


@dataclass(frozen=True)
class Stage:
    """A sandbox with the sample repo in it, and how its owner looks into it."""

    sandbox: Sandbox
    workdir: str
    model_host: str
    look: Look
    what: str


def main() -> int:
    """Run the demo; 0 when everything that it claims was seen."""
    parser = argparse.ArgumentParser(description="Watch NOOA fix a bug in a sandbox.")
    parser.add_argument("--local", action="store_true", help="use a folder of this machine even if a Docker engine is there")
    options = parser.parse_args()
    say("Building what gets pushed (cached from the second time on).")
    interpreter = artifacts.interpreter(arch=artifacts.host_arch(), report=say)
    artifacts.payload("nooa", interpreter=interpreter, report=say)
    archive = artifacts.archive(report=say)
    say(f"archive {archive.path.stat().st_size:,} bytes; CPython {interpreter.version}, needs glibc {interpreter.glibc_floor}")
    with tempfile.TemporaryDirectory(prefix="boxstrap-demo-") as folder, stage(Path(folder), local=options.local) as box:
        say(f"\nThe sandbox: {box.what}")
        with ScriptedModel(bind=box.model_host) as model:
            runs = [one(box, model.url, Path(folder) / "out", name) for name in ("cold", "warm")]
    results = {name: result for name, (result, _, _) in zip(("cold", "warm"), runs, strict=True)}
    table(results, [total for _, total, _ in runs])
    problems = [problem for _, _, found in runs for problem in found]
    for problem in problems:
        say(f"NOT AS PROMISED: {problem}")
    return 1 if problems else 0


def one(box: Stage, url: str, out: Path, name: str) -> tuple[Result, float, list[str]]:
    """Run one session on the unfixed repo; return its result, its seconds, and what was not as promised."""
    say(f"\n--- {name} session " + "-" * 60)
    box.look(f"git -C '{box.workdir}' checkout -q -- .")
    failing, _ = box.look(f"cd '{box.workdir}' && python3 -B -m unittest -q")
    spec = SessionSpec(
        session_id=f"demo-{name}",
        agent="nooa",
        workdir=box.workdir,
        out=out / name,
        model=Model(url=url, name="scripted"),
    )
    begun = time.monotonic()
    result = asyncio.run(session(box.sandbox, spec))
    seconds = time.monotonic() - begun
    show_result(CONSOLE, result)
    diff = box.look(f"git -C '{box.workdir}' -c color.diff=never diff")[1]
    passing, tests = box.look(f"cd '{box.workdir}' && python3 -B -m unittest 2>&1")
    status = box.look(f"git -C '{box.workdir}' status --porcelain --ignored")[1].splitlines()
    left = box.look("grep -lz '^BOXSTRAP_SESSION=' /proc/[0-9]*/environ 2>/dev/null")[1].split()
    say(f"\nThe agent's diff, as its owner sees it (git status: {status}):\n{diff}\nThe repo's own tests:\n{tests}")
    promises = {
        "the repo's tests fail before the agent": failing != 0,
        "the agent completed": result.outcome is Outcome.COMPLETED,
        "the repo's tests pass after it": passing == 0,
        "git status shows the agent's one edit only": len(status) == 1 and status[0].startswith(" M "),
        "the receipt confirms the cleanup": result.receipt is not None and result.receipt.cleanup_confirmed,
        "no process of the session is left": not left,
        "the evidence has no gap": not result.gaps,
        "the sandbox is still alive": box.look("true")[0] == 0,
    }
    for promise, kept in promises.items():
        say(f"  {'yes' if kept else 'NO '}  {promise}")
    return result, seconds, [f"{name}: {promise}" for promise, kept in promises.items() if not kept]


async def session(sandbox: Sandbox, spec: SessionSpec) -> Result:
    """Open, invoke, close, with live progress."""
    progress = Progress(CONSOLE)
    async with open_session(sandbox, spec, on_event=progress.event, on_phase=progress.phase) as opened:
        state = opened.installed.state if opened.installed else ""
        progress.line("runtime", f"{state} at {opened.runtime.path if opened.runtime else ''}")
        result = await opened.invoke(spec.request(PROMPT))
    return opened.result or result


@contextlib.contextmanager
def stage(folder: Path, *, local: bool) -> Iterator[Stage]:
    """Make the sandbox, as its owner; it is removed only after the last look."""
    engine = None if local else _engine()
    if engine is None:
        repo = folder / "bills"
        make_sample_repo(repo)

        def look_here(command: str) -> tuple[int, str]:
            done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
            return done.returncode, done.stdout

        yield Stage(LocalSandbox(folder / "box"), str(repo), "127.0.0.1", look_here, f"a folder of this machine, {folder}/box")
        return
    repo = folder / "bills"
    make_sample_repo(repo)
    boxes = containers.Containers(engine, tag_of=lambda name: f"boxstrap/{name}")
    try:
        with containers.internal_network(engine) as network:
            box = boxes(IMAGE, network=network.name)
            box.put(repo, "/work/bills")

            def look(command: str) -> tuple[int, str]:
                ran = box.exec(command)
                return ran.code, ran.out.decode(errors="replace")

            what = f"container {box.name} of boxstrap/{IMAGE}, on a network that leads to {network.host} only"
            try:
                yield Stage(DockerSandbox(box.id), "/work/bills", network.host, look, what)
            finally:
                boxes.remove()
    finally:
        boxes.remove()


def _engine() -> docker.DockerClient | None:
    """Return the engine if it answers and has, or can be given, the image."""
    try:
        client = docker.from_env(timeout=120)
        client.ping()
    except DockerException:
        say("No Docker engine answers: the sandbox will be a folder of this machine.")
        return None
    builder = Path(__file__).parents[1] / "images" / "build.py"
    if subprocess.run([sys.executable, str(builder), IMAGE], check=False).returncode != 0:
        say(f"The image boxstrap/{IMAGE} cannot be had here: the sandbox will be a folder of this machine.")
        return None
    return client


def table(results: dict[str, Result], totals: list[float]) -> None:
    """Print the phases side by side."""
    shown = Table("phase", *(f"{name}, s" for name in results), title="Phases", title_justify="left")
    names = list(dict.fromkeys(phase for result in results.values() for phase in result.seconds))
    for phase in names:
        shown.add_row(
            phase, *(f"{result.seconds[phase]:.2f}" if phase in result.seconds else "-" for result in results.values())
        )
    shown.add_section()
    shown.add_row("whole session", *(f"{total:.2f}" for total in totals))
    CONSOLE.print(shown)


def say(text: str) -> None:
    """Print a line of the demo."""
    CONSOLE.print(Text(text), soft_wrap=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BoxstrapError as error:
        sys.exit(f"demo: {error.code}: {error}")
