# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""aarch64 in a real arm64 box, under emulation where this machine is of another architecture.

It is left out by name where the kernel cannot be taught to run such programs.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from box_fixtures import PUSHED, Ask, Pushed, ask, code_of, failed, installed_by, light, pushed, rows, start
from containers import Box

from boxstrap.runner.wire import Request, runtime_digest, to_json

__all__ = ["ask", "light", "pushed", "rows", "start"]

pytestmark = pytest.mark.container
IMAGE = "debian-arm64:12"
UNUSED = {"__pycache__", "test", "lib2to3", "pydoc_data", "unittest", "distutils", "idlelib", "tkinter", "ensurepip", "xml"}
EMULATION = Path(__file__).resolve().parent.parent / "images" / "debian" / "emulation.sh"


@pytest.fixture
def arm(start: Callable[..., Box]) -> Callable[..., Box]:
    """`arm()` is an arm64 box without a network."""
    done = subprocess.run(["sh", EMULATION], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no arm64 here: {done.stderr.strip().splitlines()[-1]}")
    return functools.partial(start, IMAGE)


def test_check_in_an_arm64_box_is_right_and_leaves_no_trace(arm: Callable[..., Box], ask: Ask) -> None:
    """Architecture and loader are the box's, everything but the glibc's version is found, and people get a table."""
    box = arm(push="light")
    code, answer = ask(box, "check", ["--workdir", "/", "--glibc-floor", "2.35"])
    assert (code, failed(answer)) == (0, set())
    assert answer.report is not None
    facts = answer.report.facts
    assert (facts["arch"], facts["loader"], facts["libc"]) == ("aarch64", "ld-linux-aarch64.so.1", "glibc")
    assert facts["libc_version"] == "2.36"
    ran = box.exec(["sh", f"{PUSHED}/boxstrap.pyz", "check", "--agent", "test", "--workdir", "/none"])
    assert ran.code == 69
    assert b"fail  workdir-missing" in ran.out
    assert b"ok    unsupported-arch  aarch64\n" in ran.out
    status = box.exec(["sh", f"{PUSHED}/boxstrap.pyz", "status", "--session", "/tmp/x", "--json"])
    assert (status.code, json.loads(status.out)["failure"]["code"]) == (69, "runtime-missing")
    assert [change for change in box.diff() if change not in {f"A {PUSHED}", "C /"}] == []


def test_arm64_box_refuses_an_interpreter_of_this_machine_or_none(
    arm: Callable[..., Box], ask: Ask, light: Pushed, tmp_path: Path
) -> None:
    """This machine's own launcher asks for another loader: refused by name, and nothing is left of it."""
    if os.uname().machine == "aarch64":
        pytest.skip("this machine's interpreter is the right one")
    box = arm(push="light")
    with tarfile.open(light.folder / "python.tar.gz") as whole, tarfile.open(tmp_path / "python.tar.gz", "w:gz") as out:
        for member in whole:
            if member.name.startswith("bin/"):
                out.addfile(member, whole.extractfile(member) if member.isfile() else None)
    box.put(tmp_path / "python.tar.gz", "/arm/python.tar.gz")
    words, digest = options_for(tmp_path / "python.tar.gz", light)
    assert code_of(ask(box, "install", words, note="an x86_64 interpreter")) == (69, "unsupported-arch")
    code, answer = ask(box, "install", ["--digest", digest], note="no interpreter")
    assert (code, failed(answer)) == (69, {"no-python"})
    assert [change for change in box.diff() if change.split()[1] not in {PUSHED, "/", "/arm", "/arm/python.tar.gz"}] == []


def options_for(interpreter: Path, light: Pushed) -> tuple[list[str], str]:
    """What `install` is told of an interpreter that was put into the box, and the runtime's digest."""
    sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (interpreter, light.folder / "boxstrap.pyz")]
    digest = runtime_digest(interpreter=sums[0], payload=None, arch="aarch64", archive=sums[1])
    return ["--digest", digest, "--interpreter", "/arm/python.tar.gz", "--interpreter-sha256", sums[0]], digest


def test_arm64_box_installs_and_runs_a_session(arm: Callable[..., Box], ask: Ask, light: Pushed, tmp_path: Path) -> None:
    """With an aarch64 Python, packed from the box's own packages: published, smoke-run, and a supervised agent ends well."""
    box = arm(push="light")
    packed, _ = box.container.get_archive("/usr/lib/python3.11")
    with tarfile.open(fileobj=io.BytesIO(b"".join(packed))) as source, tarfile.open(tmp_path / "python.tar.gz", "w:gz") as out:
        program, _ = box.container.get_archive("/usr/bin/python3.11")
        with tarfile.open(fileobj=io.BytesIO(b"".join(program))) as one:
            member = one.getmembers()[0]
            file = one.extractfile(member)
            member.name = "bin/python3"
            out.addfile(member, file)
        for member in source:
            if member.isfile() and not UNUSED & set(Path(member.name).parts):
                file = source.extractfile(member)
                member.name = f"lib/{member.name}"
                out.addfile(member, file)
    box.put(tmp_path / "python.tar.gz", "/arm/python.tar.gz")
    words, _ = options_for(tmp_path / "python.tar.gz", light)
    runtime = installed_by(ask(box, "install", words, note="an aarch64 interpreter"))
    request = Request(session_id="one", agent="command", workdir="/", prompt="p", argv=["uname", "-m"])
    box.check(f"mkdir -p /tmp/s/one; printf '%s' '{to_json(request)}' >/tmp/s/one/request.json")
    said = box.check(["sh", f"{runtime.path}/boxstrap.pyz", "run", "--session", "/tmp/s/one"])
    assert "cleanup          confirmed" in said
    assert '"text":"aarch64"' in box.check("cat /tmp/s/one/evidence.ndjson")
