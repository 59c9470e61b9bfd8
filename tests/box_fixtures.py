# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Real boxes for tests: what is pushed into them, how they are asked, and a table of what they answered.

Import the fixtures into a test module to use them. The table (build/boxes.md) is written from answers, not from expectations;
it refuses to hold a row that no box gave in this run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from containers import Box, Containers
from pydantic import TypeAdapter

from boxstrap.controller import artifacts
from boxstrap.runner.wire import Answer, Installed, runtime_digest

ANSWER = TypeAdapter(Answer)
PUSHED = "/pushed"
ROOT = "/opt/nemo-gym-test"
TABLE = Path(__file__).resolve().parent.parent / "build" / "boxes.md"
_HEAD = "| box | user | mounts | variables | asked | result | code |\n|---|---|---|---|---|---|---|\n"


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


def push_to(folder: Path, *, payload: artifacts.Payload | None, machine: str = "") -> Pushed:
    """Lay out the real archive and interpreter, and a payload, as the controller pushes them."""
    folder.chmod(0o755)
    for parent in folder.parents[:2]:
        parent.chmod(0o755)  # boxes with another user read it through the mount
    interpreter = artifacts.interpreter(arch=machine or os.uname().machine)
    named = {"boxstrap.pyz": artifacts.archive().path, "python.tar.gz": interpreter.path}
    if payload is not None:
        named["payload.tar.gz"] = payload.path
    sums = {}
    for name, path in named.items():
        Path(shutil.copy(path, folder / name)).chmod(0o644)
        sums[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    digest = runtime_digest(
        interpreter=sums["python.tar.gz"],
        payload=sums.get("payload.tar.gz"),
        arch=interpreter.arch,
        archive=sums["boxstrap.pyz"],
    )
    options = ["--digest", digest, "--interpreter", f"{PUSHED}/python.tar.gz", "--interpreter-sha256", sums["python.tar.gz"]]
    options += ["--glibc-floor", interpreter.glibc_floor]
    if payload is not None:
        options += ["--payload", f"{PUSHED}/payload.tar.gz", "--payload-sha256", sums["payload.tar.gz"]]
        options += [word for module in payload.smoke for word in ("--smoke", module)]
    return Pushed(folder, digest, tuple(options))


@pytest.fixture(scope="session")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Pushed:
    """The real archive, interpreter and lean NOOA payload."""
    payload = artifacts.payload("nooa", interpreter=artifacts.interpreter(arch=os.uname().machine))
    return push_to(tmp_path_factory.mktemp("pushed"), payload=payload)


@pytest.fixture(scope="session")
def light(tmp_path_factory: pytest.TempPathFactory) -> Pushed:
    """The archive and the interpreter alone: what agent `command` needs."""
    return push_to(tmp_path_factory.mktemp("light"), payload=None)


class Rows:
    """What boxes answered in this run, once each."""

    def __init__(self) -> None:
        self._rows: dict[str, None] = {}
        self._boxes: dict[str, tuple[str, ...]] = {}

    def started(self, box: Box, image: str, options: dict[str, object]) -> None:
        """Remember how a box was made."""
        mounts = [f"{path} {how}" for path, how in dict(options.get("tmpfs") or {}).items()]  # type: ignore[call-overload]
        mounts += ["read-only root"] if options.get("read_only") else []
        mounts += [
            f"{volume.split(':')[1]} {'ro' if volume.endswith(':ro') else 'rw'}"
            for volume in list(options.get("volumes") or ())  # type: ignore[call-overload]
            if PUSHED not in volume
        ]
        env = dict(options.get("env") or {})  # type: ignore[call-overload]
        variables = ", ".join(f"{name}={value}" for name, value in env.items())
        box.container.reload()
        user = str(options.get("user") or box.container.attrs["Config"]["User"] or "root")
        self._boxes[box.id] = (image, user, ", ".join(mounts), variables)

    def add(self, box: Box, asked: str, result: str, code: str, *, user: str = "", variables: str = "") -> None:
        """Note what a box answered."""
        image, image_user, mounts, env = self._boxes.get(box.id, ("?", "?", "?", "?"))
        cells = (image, user or image_user, mounts, ", ".join(filter(None, (env, variables))), asked, result, code)
        self._rows["| " + " | ".join(cell.replace("|", "/").replace("\n", " ") or "-" for cell in cells) + " |\n"] = None

    def answered(self, box: Box, asked: str, answer: Answer, status: int, **how: str) -> None:
        """Note the answer of a verb: what it refused for, or what it did."""
        result, codes = "done", {"-"}
        if answer.report is not None:
            result = "refused" if answer.report.refused else "will do"
            judged = [check for check in answer.report.checks if check.status == "fail"]
            judged = judged or [check for check in answer.report.checks if check.status == "warn"]
            codes = {f"{check.code} ({check.status})" for check in judged} or codes
        elif answer.failure is not None:
            result, codes = "refused" if status == 69 else "failed", {str(answer.failure.code)}
        elif answer.installed is not None:
            result = answer.installed.state
        self.add(box, asked, f"{result} ({status})", ", ".join(sorted(codes)), **how)

    def write(self) -> None:
        """Write the table, keeping the rows of earlier modules of this run."""
        if self._rows:
            TABLE.parent.mkdir(exist_ok=True)
            TABLE.write_text(f"{len(self._rows)} rows\n\n{_HEAD}{''.join(self._rows)}", encoding="utf-8")


_ROWS = Rows()


@pytest.fixture(scope="session")
def rows() -> Iterator[Rows]:
    """The table, written at the end of the run (a fixture that several modules import is set up once in each)."""
    yield _ROWS
    _ROWS.write()


@pytest.fixture
def start(container: Containers, rows: Rows, request: pytest.FixtureRequest) -> Callable[..., Box]:
    """`start("debian:12")` is a box without a network that sees what was pushed (`push="light"`, or `push=None`)."""

    def starter(image: str, *, push: Pushed | str | None = "pushed", **options: object) -> Box:
        seen = request.getfixturevalue(push) if isinstance(push, str) else push
        volumes = [*list(options.pop("volumes", ())), *([seen.volume()] if seen else [])]
        box = container(image, **{"network": "none", **options, "volumes": volumes})  # type: ignore[arg-type]
        rows.started(box, image, {**options, "volumes": volumes})
        return box

    return starter


Ask = Callable[..., tuple[int, Answer]]


@pytest.fixture
def ask(rows: Rows) -> Ask:
    """`ask(box, "check", ["--workdir", "/x"])` runs a verb as the controller does, reads the one line strictly, notes a row."""

    def asker(
        box: Box,
        verb: str,
        options: Sequence[str] = (),
        *,
        note: str = "",
        before: str = "",
        archive: str = f"{PUSHED}/boxstrap.pyz",
        **how: object,
    ) -> tuple[int, Answer]:
        argv = [archive, verb, "--json", "--agent", "test", *options]
        ran = box.exec(["sh", "-c", f'{before or "exec "}sh "$@"', "sh", *argv], **how)  # type: ignore[arg-type]
        assert ran.out.count(b"\n") == 1, (ran.out + ran.err).decode(errors="replace")
        assert ran.err == b""
        answer = ANSWER.validate_json(ran.out)
        env: dict[str, str] = how.get("env") or {}  # type: ignore[assignment]
        variables = ", ".join([*(f"{name}={value}" for name, value in env.items()), *filter(None, [before.strip("; ")])])
        user = str(how.get("user") or "")
        rows.answered(box, f"{verb}{', ' if note else ''}{note}", answer, ran.code, user=user, variables=variables)
        return ran.code, answer

    return asker


def failed(answer: Answer) -> set[str]:
    """What a report refuses for: code, or code and tool."""
    assert answer.report is not None, answer
    checks = [check for check in answer.report.checks if check.status == "fail"]
    assert answer.report.refused == bool(checks)
    return {check.found if check.code == "missing-tool" else check.code for check in checks}


def code_of(asked: tuple[int, Answer]) -> tuple[int, str]:
    """The status and the code of a failure."""
    status, answer = asked
    assert answer.failure is not None, answer
    assert answer.failure.remedy
    return status, answer.failure.code


def installed_by(asked: tuple[int, Answer]) -> Installed:
    """What an installation that went well says."""
    status, answer = asked
    assert status == 0, answer
    assert answer.installed is not None
    return answer.installed
