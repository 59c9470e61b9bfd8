# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The archive and the digest that names a runtime."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from boxstrap.controller import archives, artifacts, interpreters
from boxstrap.controller.errors import ArtifactError


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package's sandbox side, to edit."""
    root = tmp_path / "boxstrap"
    for part in ("bootstrap", "runner"):
        shutil.copytree(archives.package_root() / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(archives.package_root() / "__init__.py", root / "__init__.py")
    return root


def build(package: Path, tmp_path: Path) -> artifacts.Archive:
    """Build (or find) the archive of a copy in a cache of its own."""
    return artifacts.archive(cache=tmp_path / "cache", package=package)


def test_archive_is_prelude_then_zip(package: Path, tmp_path: Path) -> None:
    """The first bytes are the prelude's, and every offset of the zip counts from the file's start."""
    archive = build(package, tmp_path)
    prelude = (package / "bootstrap" / "prelude.sh").read_bytes()
    assert archive.path.read_bytes().startswith(prelude)
    assert archive.sha256 == hashlib.sha256(archive.path.read_bytes()).hexdigest()
    assert os.access(archive.path, os.X_OK)
    with zipfile.ZipFile(archive.path) as zipped:
        assert zipped.testzip() is None
        assert min(member.header_offset for member in zipped.infolist()) == len(prelude)


def test_archive_holds_the_sandbox_side_and_nothing_else(package: Path, tmp_path: Path) -> None:
    """Sources of bootstrap and runner, shiv's own few files; no controller, no bytecode, no shell scripts."""
    (package / "runner" / "left-over.sh").write_text("echo no\n")
    (package / "runner" / "__pycache__").mkdir()
    (package / "runner" / "__pycache__" / "wire.cpython-313.pyc").write_bytes(b"no")
    with zipfile.ZipFile(build(package, tmp_path).path) as zipped:
        names = zipped.namelist()
    packed = [name.removeprefix("site-packages/") for name in names if name.startswith("site-packages/")]
    assert {name.split("/")[0] for name in packed} == {"boxstrap", *archives.VENDORED}
    assert {"h11/LICENSE", "h11/__init__.py", "certifi/LICENSE", "certifi/cacert.pem"} <= set(packed)
    ours = [name.removeprefix("boxstrap/") for name in packed if name.startswith("boxstrap/")]
    assert names == sorted(names)
    assert {name.split("/")[0] for name in ours} == {"__init__.py", "bootstrap", "runner"}
    assert {Path(name).suffix for name in ours} == {".py"}
    assert {"bootstrap/__main__.py", "runner/__main__.py", "runner/wire.py", "runner/agents/__init__.py"} <= set(ours)


def test_archive_is_reproducible(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other times, modes, umask, environment and folder: the same bytes."""
    first = build(package, tmp_path)
    other = tmp_path / "elsewhere" / "boxstrap"
    shutil.copytree(package, other)
    for path in other.rglob("*.py"):
        os.utime(path, (1, 1))
        path.chmod(0o600)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.setenv("SHIV_ROOT", "/nonexistent")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    before = os.umask(0o077)
    try:
        second = artifacts.archive(cache=tmp_path / "other-cache", package=other)
    finally:
        os.umask(before)
    assert first.path != second.path
    assert first.path.read_bytes() == second.path.read_bytes()


def test_archive_is_rebuilt_only_when_its_sources_change(package: Path, tmp_path: Path) -> None:
    """A newer time is no change; a byte in Python or in the prelude is."""
    first = build(package, tmp_path)
    os.utime(package / "runner" / "wire.py")
    assert build(package, tmp_path) == first
    digests = {first.sha256}
    for name in ("runner/wire.py", "bootstrap/prelude.sh"):
        with (package / name).open("a") as source:
            source.write("# changed\n")
        digests.add(build(package, tmp_path).sha256)
    (package / "runner" / "new.py").touch()
    digests.add(build(package, tmp_path).sha256)
    assert len(digests) == 4


def test_archive_without_its_sources_is_said(package: Path, tmp_path: Path) -> None:
    """An install that lost files is an error with one sentence."""
    (package / "bootstrap" / "prelude.sh").unlink()
    with pytest.raises(ArtifactError, match=r"does not hold bootstrap/prelude\.sh"):
        build(package, tmp_path)


def pythons() -> list[Path]:
    """One Python of each version from 3.11 that this host has."""
    found = {sys.version.split()[0]: Path(sys.executable)}
    found |= {c.version: c.executable for _, c in interpreters.survey() if isinstance(c, interpreters.Candidate)}
    return list(found.values())


def test_archive_imports_on_every_python(package: Path, tmp_path: Path) -> None:
    """Zipimport reads our code behind the prelude, and a zipapp run of the whole file reaches our main."""
    archive = build(package, tmp_path)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import boxstrap.runner.wire as w; print(w.__file__)"
    for python in pythons():
        done = subprocess.run(
            [python, "-I", "-c", code, f"{archive.path}/site-packages"], check=True, capture_output=True, text=True
        )
        assert done.stdout.strip() == f"{archive.path}/site-packages/boxstrap/runner/wire.py"


def test_archive_of_this_checkout_is_in_dist(tmp_path: Path) -> None:
    """dist/boxstrap.pyz, which the README names, is what is pushed."""
    archive = artifacts.archive(cache=tmp_path)
    checkout = Path(archives.__file__).resolve().parent.parent
    assert (checkout / "dist" / "boxstrap.pyz").read_bytes() == archive.path.read_bytes()


def made_up(sha256: str = "a" * 64, arch: str = "x86_64") -> artifacts.Interpreter:
    """An interpreter's facts."""
    return artifacts.Interpreter(Path("/x"), sha256, "3.13.0", arch, "2.35", 1)


def test_runtime_digest_is_as_the_contract_says() -> None:
    """The host and the sandbox agree on one text; the value is written out."""
    payload = artifacts.Payload(Path("/y"), "b" * 64, "nooa", "lean", "x86_64", "3.13", "2.17", 1, ())
    archive = artifacts.Archive(Path("/z"), "c" * 64)
    text = f"boxstrap-runtime-1\n{'a' * 64}\n{'b' * 64}\nx86_64\n{'c' * 64}\n"
    assert artifacts.runtime_digest(made_up(), payload, archive) == hashlib.sha256(text.encode()).hexdigest()
    text = f"boxstrap-runtime-1\n{'a' * 64}\n-\nx86_64\n{'c' * 64}\n"
    assert artifacts.runtime_digest(made_up(), None, archive) == hashlib.sha256(text.encode()).hexdigest()


def test_runtime_digest_changes_with_each_part() -> None:
    """Another interpreter, payload, architecture or archive is another runtime."""
    payload = artifacts.Payload(Path("/y"), "b" * 64, "nooa", "lean", "x86_64", "3.13", "2.17", 1, ())
    archive = artifacts.Archive(Path("/z"), "c" * 64)
    digests = {
        artifacts.runtime_digest(made_up(), payload, archive),
        artifacts.runtime_digest(made_up(sha256="d" * 64), payload, archive),
        artifacts.runtime_digest(made_up(), None, archive),
        artifacts.runtime_digest(made_up(arch="aarch64"), payload, archive),
        artifacts.runtime_digest(made_up(), payload, artifacts.Archive(Path("/z"), "e" * 64)),
    }
    assert len(digests) == 5
