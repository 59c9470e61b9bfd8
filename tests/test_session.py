# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Sessions through the controller, on real containers and on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from containers import Box, Containers, InternalNetwork
from polling import eventually
from sample_repo import PROMPT, make_sample_repo
from scripted_model import ScriptedModel

from boxstrap.controller.budgets import Budgets
from boxstrap.controller.collect import read_events
from boxstrap.controller.errors import PreflightError, SessionConflict, SessionStateError, SetupFailed, UsageError
from boxstrap.controller.sandbox import ExecResult, Sandbox
from boxstrap.controller.sandboxes.docker import DockerSandbox
from boxstrap.controller.sandboxes.local import LocalSandbox
from boxstrap.controller.session import Result, SessionSpec, open_session
from boxstrap.runner.wire import Event, Model, Outcome

MARKED = "grep -lz '^BOXSTRAP_SESSION=' /proc/[0-9]*/environ 2>/dev/null | wc -l"
"""Counts the processes of any session in a box; shares no code with the reaper."""


def spec(tmp_path: Path, *argv: str, **fields: Any) -> SessionSpec:
    """Say what a session of agent `command` is."""
    name = f"t{os.getpid()}-{tmp_path.name}"
    defaults: dict[str, Any] = {
        "session_id": name,
        "agent": "command",
        "workdir": "/tmp",
        "out": tmp_path / "out",
        "argv": list(argv),
    }
    return SessionSpec(**{**defaults, **fields})


async def once(
    sandbox: Sandbox, wanted: SessionSpec, prompt: str = "p", on_event: Callable[[Event], None] | None = None
) -> Result:
    """Open, invoke, close."""
    async with open_session(sandbox, wanted, on_event=on_event) as session:
        result = await session.invoke(wanted.request(prompt))
    return session.result or result


class Counting:
    """A sandbox that counts what goes through it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.uploads: list[str] = []
        self.commands: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def exec(self, command: str, **how: Any) -> ExecResult:
        """Count and pass on."""
        self.commands.append(command)
        result: ExecResult = await self.inner.exec(command, **how)
        return result

    async def upload(self, local_path: str | os.PathLike[str], remote_path: str) -> None:
        """Count and pass on."""
        self.uploads.append(remote_path)
        await self.inner.upload(local_path, remote_path)


@pytest.fixture(params=["local", pytest.param("docker", marks=pytest.mark.container)])
def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Counting]:
    """The same claims hold in a bare container without network and in a folder of this machine."""
    if request.param == "local":
        yield Counting(LocalSandbox(tmp_path / "box"))
    else:
        box: Box = request.getfixturevalue("container")("debian:12", network="none")
        yield Counting(DockerSandbox(box.id))


async def test_agent_failure_is_a_result_with_its_exit_code(sandbox: Counting, tmp_path: Path) -> None:
    result = await once(sandbox, spec(tmp_path, "sh", "-c", "echo hello; exit 7"))
    assert (result.outcome, result.gradable) == (Outcome.AGENT_FAILED, False)
    assert result.receipt is not None
    assert result.receipt.exit_code == 7
    assert result.gaps == []
    assert [event.data["text"] for event in read_events(result.evidence) if event.kind == "log"] == ["hello"]


async def test_second_session_pushes_and_installs_nothing(sandbox: Counting, tmp_path: Path) -> None:
    await once(sandbox, spec(tmp_path, "true"))
    sandbox.uploads.clear()
    second = spec(tmp_path, "true", session_id="second", out=tmp_path / "second")
    async with open_session(sandbox, second) as session:
        assert session.installed is not None
        assert session.installed.state == "reused"
        assert sandbox.uploads == []
        result = await session.invoke(second.request("p"))
    assert result.outcome is Outcome.COMPLETED
    assert [os.path.basename(path) for path in sandbox.uploads] == ["request.json"]  # noqa: PTH119 (a path in the box)


async def test_close_leaves_nothing_but_the_published_runtime(sandbox: Counting, tmp_path: Path) -> None:
    wanted = spec(tmp_path, "sh", "-c", "(setsid sleep 600 </dev/null >/dev/null 2>&1 &); echo started")
    async with open_session(sandbox, wanted) as session:
        await session.invoke(wanted.request("p"))
        paths, runtime = session.paths, session.runtime
    assert runtime is not None
    look = (await sandbox.exec(f"ls -A {os.path.dirname(paths.path)} 2>/dev/null; ls -A {runtime.root}")).stdout or ""  # noqa: PTH120
    assert [name for name in look.split() if not name.startswith(".lock-")] == [runtime.digest[:16]]
    assert session.result is not None
    assert session.result.receipt is not None
    assert session.result.receipt.cleanup_confirmed


async def test_identical_invokes_share_one_activation_and_another_is_refused(sandbox: Counting, tmp_path: Path) -> None:
    wanted = spec(tmp_path, "sh", "-c", "echo once >> $HOME/count; cat $HOME/count")
    async with open_session(sandbox, wanted) as session:
        request = wanted.request("p")
        results = await asyncio.gather(*(session.invoke(request) for _ in range(5)))
        assert {result.outcome for result in results} == {Outcome.COMPLETED}
        with pytest.raises(SessionConflict):
            await session.invoke(replace(request, prompt="other"))
    texts = [event.data["text"] for event in read_events(results[0].evidence) if event.kind == "log"]
    assert texts == ["once"]


async def test_deadline_is_partial_and_gradable(sandbox: Counting, tmp_path: Path) -> None:
    wanted = spec(tmp_path, "sh", "-c", "echo working; exec sleep 600", budgets=Budgets().with_worker(1.0))
    result = await once(sandbox, wanted)
    assert (result.outcome, result.gradable) == (Outcome.DEADLINE_EXCEEDED, True)


async def test_cancelled_caller_stops_the_agent_and_still_collects(sandbox: Counting, tmp_path: Path) -> None:
    wanted = spec(tmp_path, "sh", "-c", "echo working; exec sleep 600")
    seen = asyncio.Event()
    task = asyncio.create_task(once(sandbox, wanted, on_event=lambda event: seen.set() if event.kind == "log" else None))
    await asyncio.wait_for(seen.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    written = json.loads((tmp_path / "out" / "result.json").read_text())
    assert written["outcome"] == "cancelled"
    assert written["receipt"]["cleanup_confirmed"] is True
    assert [event.kind for event in read_events(tmp_path / "out" / "evidence.ndjson")][-1] == "ended"


async def test_illegal_order_is_refused(sandbox: Counting, tmp_path: Path) -> None:
    wanted = spec(tmp_path, "true")
    async with open_session(sandbox, wanted) as session:
        with pytest.raises(SessionStateError):
            await session.open()
    with pytest.raises(SessionStateError):
        await session.invoke(wanted.request("p"))
    assert await session.close() is None


@pytest.mark.parametrize("name", ["../x", "", "a/b", ".hidden", "x" * 200])
async def test_session_id_that_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        await once(LocalSandbox(tmp_path / "box"), spec(tmp_path, "true", session_id=name))


async def test_host_secret_in_a_request_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "canary-0123456789")
    with pytest.raises(UsageError) as caught:
        await once(LocalSandbox(tmp_path / "box"), spec(tmp_path, "true", env={"X": "canary-0123456789"}))
    assert "SOME_API_KEY" in str(caught.value)
    assert "canary" not in str(caught.value)


CONTROLLER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from boxstrap.controller.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.container
@pytest.mark.parametrize("base", ["debian:12", "debian:13"])
def test_killed_controller_attaches_again_with_one_activation_and_gapless_evidence(
    container: Containers, tmp_path: Path, base: str
) -> None:
    """Kill -9 in the middle, twice; the third controller completes. The agent ran once, and every line is there once."""
    box = container(base, network="none")
    box.check("mkdir /work")
    (tmp_path / "prompt").write_text("p")
    script = "echo once >> /work/count; i=0; while [ $i -lt 60 ]; do i=$((i+1)); echo line $i; sleep 0.1; done"
    words = ["run", "--docker", box.id, "--agent", "command", "--workdir", "/work", "--prompt-file", str(tmp_path / "prompt")]
    words += ["--session", "killed", "--out", str(tmp_path / "out"), "--", "sh", "-c", script]
    argv = [sys.executable, "-c", CONTROLLER, str(Path(__file__).parents[1] / "src"), *words]
    evidence = tmp_path / "out" / "evidence.ndjson"
    for round_number in (1, 2):
        controller = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        lines = 8 * round_number
        eventually(lambda lines=lines: evidence.exists() and evidence.read_bytes().count(b"\n") > lines, within_s=60)
        controller.send_signal(signal.SIGKILL)
        controller.wait()
    last = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert last.returncode == 0, last.stdout + last.stderr
    events = list(read_events(evidence))
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert [event.data["text"] for event in events if event.kind == "log"] == [f"line {i}" for i in range(1, 61)]
    assert json.loads((tmp_path / "out" / "result.json").read_text())["gaps"] == []
    assert box.check("cat /work/count") == "once"
    assert box.check(MARKED) == "0"


@pytest.mark.container
def test_interrupt_of_the_command_stops_collects_and_says_so(container: Containers, tmp_path: Path) -> None:
    box = container("debian:12", network="none")
    (tmp_path / "prompt").write_text("p")
    words = ["run", "--docker", box.id, "--agent", "command", "--workdir", "/tmp", "--prompt-file", str(tmp_path / "prompt")]
    words += ["--out", str(tmp_path / "out"), "--", "sh", "-c", "echo working; exec sleep 600"]
    argv = [sys.executable, "-c", CONTROLLER, str(Path(__file__).parents[1] / "src"), *words]
    controller = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    evidence = tmp_path / "out" / "evidence.ndjson"
    eventually(lambda: evidence.exists() and b"working" in evidence.read_bytes(), within_s=60)
    controller.send_signal(signal.SIGINT)
    out, _ = controller.communicate(timeout=60)
    assert controller.returncode == 9
    assert "interrupted" in out
    assert "outcome    cancelled" in out
    assert box.check(MARKED) == "0"
    assert box.check("ls -A /tmp") == ""


@pytest.mark.container
@pytest.mark.parametrize("how", ["kill", "pause", "remove"])
async def test_lost_sandbox_is_named_at_once_and_what_was_written_is_kept(
    container: Containers, tmp_path: Path, how: str
) -> None:
    box = container("debian:12", network="none")
    wanted = spec(tmp_path, "sh", "-c", "echo written; exec sleep 600")
    seen = asyncio.Event()
    task = asyncio.create_task(
        once(DockerSandbox(box.id), wanted, on_event=lambda event: seen.set() if event.kind == "log" else None)
    )
    await asyncio.wait_for(seen.wait(), 60)
    begun = time.monotonic()
    getattr(box, how)()
    result = await asyncio.wait_for(task, 30)
    assert time.monotonic() - begun < 20
    assert (result.outcome, result.gradable, result.outcome.retryable) == (Outcome.SANDBOX_LOST, False, True)
    assert "written" in [event.data.get("text") for event in read_events(result.evidence)]


@pytest.mark.container
@pytest.mark.parametrize(
    ("base", "code", "word"),
    [
        ("alpine:3.22", "unsupported-libc", "musl"),
        ("python-alpine:3.12", "unsupported-libc", "musl"),
        ("busybox", "missing-tool", "bash"),
        ("noshell", "missing-tool", "shell"),
        ("debian:11", "libc-too-old", "2.31"),
    ],
)
async def test_box_that_cannot_work_is_refused_and_left_as_it_was(
    container: Containers, tmp_path: Path, base: str, code: str, word: str
) -> None:
    box = container(base, network="none")
    before = box.diff()
    with pytest.raises(SetupFailed) as caught:
        await once(DockerSandbox(box.id), spec(tmp_path, "true", workdir="/"))
    codes = (
        {check.code for check in caught.value.report.checks if check.status == "fail"}
        if isinstance(caught.value, PreflightError)
        else {caught.value.code}
    )
    assert code in codes
    assert word in str(caught.value)
    assert [line for line in box.diff() if line not in before and line != "C /tmp"] == []


@pytest.mark.container
@pytest.mark.parametrize("base", ["task", "task13"])
@pytest.mark.parametrize("api", ["responses", "chat"])
async def test_nooa_fixes_the_sample_repo_in_a_box_without_a_way_out(
    container: Containers, internal_network: InternalNetwork, tmp_path: Path, base: str, api: str
) -> None:
    """The main job: the edit and nothing else in the repo, passing tests, model calls in the evidence, nothing left."""
    make_sample_repo(tmp_path / "bills")
    box = container(base, network=internal_network.name)
    box.put(tmp_path / "bills", "/work/bills")
    with ScriptedModel(bind=internal_network.host, strict=True) as model:
        wanted = spec(tmp_path, agent="nooa", workdir="/work/bills", model=Model(url=model.url, name="scripted", api=api))
        result = await once(DockerSandbox(box.id), wanted, PROMPT)
        asked = len(model.calls)
    assert (result.outcome, result.gaps) == (Outcome.COMPLETED, [])
    calls = [event.data for event in read_events(result.evidence) if event.kind == "model_call"]
    assert len(calls) == asked == 4
    assert box.check("git -C /work/bills status --porcelain --ignored") == " M bills/split.py"
    assert box.exec("cd /work/bills && python3 -B -m unittest -q").code == 0
    assert box.check(MARKED) == "0"
    assert box.check("ls -A /tmp; ls -A $HOME | grep -v -e ^.bashrc -e ^.profile || :") == ""
