# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Checking and installing in real boxes: each is refused for its own reason, and left as it was found."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from containers import Box, Containers
from pydantic import TypeAdapter

from boxstrap.controller import artifacts
from boxstrap.runner.layout import LOCK
from boxstrap.runner.wire import Answer, Installed, runtime_digest

pytestmark = pytest.mark.container
_ANSWER = TypeAdapter(Answer)
PUSHED = "/pushed"
ROOT = "/opt/nemo-gym-test"


@dataclass(frozen=True)
class Pushed:
    """A folder of the host that boxes see read-only, and the options that belong to it."""

    folder: Path
    digest: str
    options: tuple[str, ...]

    def volume(self) -> str:
        """For Containers.__call__."""
        return f"{self.folder}:{PUSHED}:ro"

    @property
    def runtime(self) -> str:
        """Where it is published."""
        return f"{ROOT}/{self.digest[:16]}"


@pytest.fixture(scope="session")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Pushed:
    """The real archive, interpreter and lean NOOA payload."""
    folder = tmp_path_factory.mktemp("pushed")
    folder.chmod(0o755)
    for parent in folder.parents[:2]:
        parent.chmod(0o755)  # boxes with another user read it through the mount
    interpreter = artifacts.interpreter(arch=os.uname().machine)
    payload = artifacts.payload("nooa", interpreter=interpreter)
    assert payload is not None
    archive = Path(shutil.copy(artifacts.archive().path, folder / "boxstrap.pyz"))
    sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (interpreter.path, payload.path, archive)]
    for path, name in ((interpreter.path, "python.tar.gz"), (payload.path, "payload.tar.gz")):
        shutil.copy(path, folder / name)
    for path in folder.iterdir():
        path.chmod(0o644)
    digest = runtime_digest(interpreter=sums[0], payload=sums[1], arch=interpreter.arch, archive=sums[2])
    options = ["--digest", digest, "--interpreter", f"{PUSHED}/python.tar.gz", "--interpreter-sha256", sums[0]]
    options += ["--payload", f"{PUSHED}/payload.tar.gz", "--payload-sha256", sums[1]]
    options += ["--glibc-floor", interpreter.glibc_floor]
    options += [word for module in payload.smoke for word in ("--smoke", module)]
    return Pushed(folder, digest, tuple(options))


@pytest.fixture
def start(container: Containers, pushed: Pushed) -> Callable[..., Box]:
    """`start("debian:12")` is a box without a network that sees what was pushed."""

    def starter(image: str, **options: object) -> Box:
        return container(image, **{"network": "none", "volumes": [pushed.volume()], **options})  # type: ignore[arg-type]

    return starter


def ask(box: Box, verb: str, options: Sequence[str] = ()) -> tuple[int, Answer]:
    """Runs a verb as the controller does, and reads the one line strictly."""
    ran = box.exec(["sh", f"{PUSHED}/boxstrap.pyz", verb, "--json", "--agent", "test", *options])
    assert ran.out.count(b"\n") == 1, (ran.out + ran.err).decode(errors="replace")
    assert ran.err == b""
    return ran.code, _ANSWER.validate_json(ran.out)


def failed(answer: Answer) -> set[str]:
    """What a report refuses for: code, or code and tool."""
    assert answer.report is not None, answer
    checks = [check for check in answer.report.checks if check.status == "fail"]
    assert answer.report.refused == bool(checks)
    return {check.found if check.code == "missing-tool" else check.code for check in checks}


def install(box: Box, pushed: Pushed, *extra: str) -> Installed:
    """Installs, which must go well."""
    code, answer = ask(box, "install", [*pushed.options, *extra])
    assert code == 0, answer
    assert answer.installed is not None
    return answer.installed


REFUSED = [
    ("alpine:3.22", {"unsupported-libc", "no bash"}),
    ("python-alpine:3.12", {"unsupported-libc", "no bash", "not-writable"}),
    ("busybox", {"unsupported-libc", "no bash", "no flock"}),
    ("no-flock", {"no flock"}),
    ("no-tar", {"no tar"}),
    ("no-sha256sum", {"no sha256sum"}),
    ("no-gzip", {"no gzip"}),
    ("nonroot", {"not-writable"}),
    ("uid1234", {"not-writable"}),
]


@pytest.mark.parametrize(("name", "reasons"), REFUSED, ids=[name for name, _ in REFUSED])
def test_box_is_refused_by_name_and_left_as_it_was(
    start: Callable[..., Box], pushed: Pushed, name: str, reasons: set[str]
) -> None:
    """Check and install say the same, with status 69, and write nothing."""
    box = start(name)
    for verb, options in (("check", ()), ("install", pushed.options)):
        code, answer = ask(box, verb, options)
        assert (code, failed(answer)) == (69, reasons)
    assert [change for change in box.diff() if change not in {f"A {PUSHED}", "C /"}] == []


def test_box_without_a_writable_opt_installs_where_it_may(start: Callable[..., Box], pushed: Pushed) -> None:
    """The remedy names the option, and the option helps: also for a user without a name and without a home."""
    box = start("uid1234")
    _, answer = ask(box, "check")
    assert answer.report is not None
    remedy = next(check.remedy for check in answer.report.checks if check.status == "fail")
    assert "--runtime-root" in remedy
    assert install(box, pushed, "--runtime-root", "/tmp/runtimes").state == "installed"


def test_box_with_an_older_glibc_is_refused_by_running_the_interpreter(start: Callable[..., Box], pushed: Pushed) -> None:
    """Check only warns; install refuses with both numbers, and leaves nothing."""
    box = start("debian:11")
    code, answer = ask(box, "check", ["--glibc-floor", "2.35"])
    assert (code, failed(answer)) == (0, set())
    code, answer = ask(box, "install", pushed.options)
    assert answer.failure is not None, answer
    assert (code, answer.failure.code) == (69, "libc-too-old")
    assert "found glibc 2.31, needed 2.35" in answer.failure.message
    assert [change for change in box.diff() if change not in {f"A {PUSHED}", "C /"}] == []


def test_box_with_a_read_only_root_is_refused_or_uses_the_given_roots(start: Callable[..., Box], pushed: Pushed) -> None:
    """The reason is the system's own."""
    box = start("debian:12", read_only=True, tmpfs={"/work": "exec"})
    code, answer = ask(box, "check")
    assert (code, failed(answer)) == (69, {"not-writable"})
    assert answer.report is not None
    assert "Read-only file system" in next(check.found for check in answer.report.checks if check.status == "fail")
    roots = ["--runtime-root", "/work/runtimes", "--session-root", "/work/sessions"]
    assert install(box, pushed, *roots).state == "installed"


def test_box_with_noexec_mounts_is_refused(start: Callable[..., Box], pushed: Pushed) -> None:
    """Files can be written and shells read them, but the kernel starts no program there."""
    box = start("debian:12", tmpfs={"/opt": "noexec", "/tmp": "noexec"})
    for verb, options in (("check", ()), ("install", pushed.options)):
        code, answer = ask(box, verb, options)
        assert (code, failed(answer)) == (69, {"noexec"})
    assert box.check("ls -A /opt /tmp") == "/opt:\n\n/tmp:"


def test_box_without_space_is_refused_before_or_cleaned_after(start: Callable[..., Box], pushed: Pushed) -> None:
    """A full disk half way is no-space too, and the stage is gone."""
    box = start("debian:12", tmpfs={"/opt": "exec,size=8m"})
    code, answer = ask(box, "check", ["--need-mib", "100"])
    assert (code, failed(answer)) == (69, {"no-space"})
    code, answer = ask(box, "install", pushed.options)
    assert answer.failure is not None, answer
    assert (code, answer.failure.code) == (73, "no-space")
    assert box.check("ls -A /opt") == ""
    box = start("debian:12", tmpfs={"/opt": "exec,size=52m"})
    code, answer = ask(box, "install", pushed.options)
    assert answer.failure is not None, answer
    assert (code, answer.failure.code) == (73, "no-space")
    assert box.check("ls -A /opt") == ""


def test_box_gets_one_installation_from_eight_installers(start: Callable[..., Box], pushed: Pushed) -> None:
    """They begin together; then it is reused, and repaired after damage."""
    box = start("debian:12", tmpfs={"/opt": "exec"})
    command = shlex.join(["sh", f"{PUSHED}/boxstrap.pyz", "install", "--json", "--agent", "test", *pushed.options])
    lines = box.check(f"for i in 1 2 3 4 5 6 7 8; do {command} & done; wait").splitlines()
    answers = [_ANSWER.validate_json(line).installed for line in lines]
    assert sorted(answer.state if answer else "failed" for answer in answers) == ["installed"] + ["reused"] * 7
    assert install(box, pushed).state == "reused"
    box.check(f"rm {pushed.runtime}/site/pydantic/main.py")
    assert install(box, pushed).state == "repaired"
    assert install(box, pushed, "--verify").state == "reused"
    assert box.check(f"ls -A {ROOT}").split() == [f"{LOCK}{pushed.digest[:16]}", pushed.digest[:16]]


def test_box_refuses_corrupt_uploads_and_is_left_as_it_was(start: Callable[..., Box], pushed: Pushed, tmp_path: Path) -> None:
    """Truncated and flipped, archive, interpreter and payload: 73, upload-corrupt, and only the pushed files are there."""
    box = start("debian:12", volumes=[])
    for name in ("boxstrap.pyz", "python.tar.gz", "payload.tar.gz"):
        for damage in ("truncate", "flip"):
            for path in pushed.folder.iterdir():
                shutil.copy(path, tmp_path)
            raw = bytearray((tmp_path / name).read_bytes())
            raw[len(raw) * 3 // 4] ^= 1
            (tmp_path / name).write_bytes(raw if damage == "flip" else raw[: len(raw) // 2])
            box.put(tmp_path, PUSHED)
            code, answer = ask(box, "install", pushed.options)
            assert answer.failure is not None, answer
            assert (code, answer.failure.code) == (73, "upload-corrupt"), (name, damage)
    assert {change.split(" ")[1].split("/")[1] for change in box.diff()} == {PUSHED.strip("/")}


def test_box_with_a_damaged_runtime_in_its_image_is_repaired(
    start: Callable[..., Box], container: Containers, pushed: Pushed
) -> None:
    """A folder of a lower layer can be neither exchanged nor renamed: EXDEV."""
    first = start("debian:12")
    install(first, pushed)
    first.check(f"rm {pushed.runtime}/site/pydantic/main.py")
    image = first.container.commit()
    try:
        baked = Containers(container.client, tag_of=lambda name: name)
        try:
            box = baked(str(image.id), network="none", volumes=[pushed.volume()])
            assert install(box, pushed).state == "repaired"
            assert install(box, pushed, "--verify").state == "reused"
        finally:
            baked.remove()
    finally:
        container.client.images.remove(image.id, force=True)


def test_box_with_a_runtime_in_its_image_needs_nothing_but_bash(
    start: Callable[..., Box], container: Containers, pushed: Pushed
) -> None:
    """Mounted read-only, without the tools that an installation needs, and without what was pushed: reused."""
    host = os.fspath(pushed.folder.parent / "baked")
    first = start("debian:12", volumes=[pushed.volume(), f"{host}:{ROOT}"])
    install(first, pushed)
    box = start("no-tar", volumes=[f"{host}:{ROOT}:ro"])
    box.check("rm /usr/bin/gzip /usr/bin/flock")
    ran = box.exec(["sh", f"{pushed.runtime}/boxstrap.pyz", "install", "--json", "--agent", "test", "--digest", pushed.digest])
    answer = _ANSWER.validate_json(ran.out)
    assert answer.installed is not None, answer
    assert answer.installed.state == "reused"
