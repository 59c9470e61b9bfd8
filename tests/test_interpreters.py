# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Finding an interpreter, packing it, and getting one from a mirror. The pack is the real one, from the user's cache."""

from __future__ import annotations

import http.server
import os
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from boxstrap.controller import artifacts, elf, interpreter_sources, interpreters, packing, standalone, tarball
from boxstrap.controller.cache import Cache
from boxstrap.controller.errors import ArtifactError, UsageError

HOST = artifacts.host_arch()


@pytest.fixture(scope="session")
def packed() -> artifacts.Interpreter:
    """The interpreter that this host's sessions use."""
    return artifacts.interpreter(arch=HOST)


@pytest.fixture(scope="session")
def tree(packed: artifacts.Interpreter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, unpacked."""
    folder = tmp_path_factory.mktemp("python")
    tarball.unpack(packed.path, folder)
    return folder


@pytest.fixture
def empty_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with nothing on it: a folder on PATH, no pyenv, no uv, and a running Python that is no candidate."""
    path = tmp_path / "path"
    path.mkdir()
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(tmp_path / "uv"))
    monkeypatch.setattr(sys, "executable", str(path / "gone"))
    monkeypatch.setenv("BOXSTRAP_INTERPRETER", "host")
    return path


def script(path: Path, text: str) -> Path:
    """Write an executable shell script."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def run_isolated(python: Path, code: str, **environment: str) -> str:
    """Run code under an unpacked interpreter with only the given environment."""
    return subprocess.run(
        [python, "-I", "-c", code], env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()


# What is found on a host


def test_interpreters_shim_that_lies_is_skipped(empty_host: Path) -> None:
    """A pyenv shim called python3.13 that runs nothing is named with what it said, and is no candidate."""
    script(empty_host / "python3.13", "echo 'pyenv: python3.13: command not found' >&2; exit 127")
    ((path, found),) = interpreters.survey()
    assert path == empty_host / "python3.13"
    assert found == "exits 127: pyenv: python3.13: command not found"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo Python 3.13.0", "prints something else"),
        ("kill -9 $$", "exits -9: no output"),
        (f'exec \'{sys.executable}\' "$@" | sed \'s/"version": "[^"]*/"version": "3.11.2/\'', "is cpython 3.11.2, needed"),
        (f'exec \'{sys.executable}\' "$@" | sed \'s/"missing": ../"missing": ["ssl"]/;s/3.11/3.13/\'', "cannot import ssl"),
    ],
)
def test_interpreters_candidate_must_prove_itself(tmp_path: Path, text: str, reason: str) -> None:
    """A wrong answer, a crash, an old version and a Python without ssl are each refused with the reason."""
    found = interpreters.examine(script(tmp_path / "python3.13", text))
    assert isinstance(found, str)
    assert reason in found


def test_interpreters_candidate_that_hangs_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate gets a bounded time to answer."""
    monkeypatch.setattr(interpreters, "PROBE_TIMEOUT_S", 0.2)
    assert interpreters.examine(script(tmp_path / "python3", "exec tail -f /dev/null")) == "does not run (TimeoutExpired)"


def test_interpreters_none_found_is_one_clear_sentence(empty_host: Path, tmp_path: Path) -> None:
    """The error names what was tried and why not, and what to install."""
    script(empty_host / "python3.12", "exit 3")
    with pytest.raises(ArtifactError) as caught:
        artifacts.interpreter(arch=HOST, cache=tmp_path / "cache")
    assert str(caught.value) == (
        f"No CPython 3.13 or 3.12 was found to pack: {empty_host}/python3.12 exits 3: no output. "
        "Install one (uv python install 3.13, pyenv install 3.13) or name one with --interpreter."
    )


def test_interpreters_best_is_lowest_floor_then_newest() -> None:
    """More boxes count more than a newer Python."""

    def candidate(version: str, floor: str) -> interpreters.Candidate:
        return interpreters.Candidate(Path("/x"), version, HOST, Path("/lib"), "lib", (), floor)

    wide, newer, newest = candidate("3.12.9", "2.9"), candidate("3.13.0", "2.35"), candidate("3.13.12", "2.35")
    assert interpreters.best([newest, wide, newer]) is wide
    assert interpreters.best([newer, newest]) is newest


def test_interpreters_candidate_survives_json() -> None:
    """What a survey remembered is what it found."""
    candidate = interpreters.Candidate(Path("/x"), "3.13.0", HOST, Path("/lib"), "lib64", (("a.so", Path("/a.so")),), "2.35")
    assert interpreters.from_json(interpreters.to_json(candidate)) == candidate


# What was packed


def test_packed_interpreter_runs_anywhere_without_the_host(tree: Path, tmp_path: Path) -> None:
    """From another folder, with an empty environment, and with the task's LD_LIBRARY_PATH full of broken libraries."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in (tree / "lib").glob("*.so*"):
        (broken / path.name).write_bytes(b"not a library")
    names = ", ".join((*interpreters.MODULES, "readline", "curses", "decimal", "zoneinfo", "multiprocessing.pool"))
    code = f"import {names}, sys; print(sys.prefix)"
    for environment in ({}, {"LD_LIBRARY_PATH": str(broken), "PYTHONHOME": "/nonexistent", "PYTHONPATH": "/nonexistent"}):
        assert run_isolated(tree / "bin" / "python3", code, **environment) == str(tree)


def test_packed_interpreter_says_what_it_needs(packed: artifacts.Interpreter, tree: Path) -> None:
    """Its version, floor and size are those of the tree, and nothing in it wants an executable stack."""
    assert run_isolated(tree / "bin" / "python3", "import platform; print(platform.python_version())") == packed.version
    assert elf.glibc_floor(elf.walk(tree)) == packed.glibc_floor
    assert packed.unpacked_bytes >= sum(path.stat().st_size for path in tree.rglob("*") if path.is_file())
    assert packed.minor in interpreters.MINORS
    elf.refuse_executable_stacks(tree)


def test_packed_interpreter_holds_only_plain_members(packed: artifacts.Interpreter) -> None:
    """Files and folders below bin/ and lib/, sorted, owned by nobody, made at no time: the sandbox refuses links."""
    with tarfile.open(packed.path) as tar:
        members = tar.getmembers()
    assert {member.name.split("/")[0] for member in members} <= {"bin", "lib", "lib64"}
    assert all(member.isreg() or member.isdir() for member in members)
    assert {(member.uid, member.gid, member.uname, member.gname, member.mtime) for member in members} == {(0, 0, "", "", 0)}
    assert {member.mode for member in members} == {0o755, 0o644}
    parts = [member.name.split("/") for member in members]
    assert parts == sorted(parts)


def test_packed_interpreter_ships_unchecked_bytecode(tree: Path) -> None:
    """Every module has a .pyc whose flags say: use me, whatever the source's time (PEP 552)."""
    sources = [path for path in tree.rglob("*.py") if "site-packages" not in path.parts]
    compiled = list(tree.rglob("*.pyc"))
    assert len(compiled) == len(sources) > 400
    assert {path.read_bytes()[4:8] for path in compiled} == {b"\x01\x00\x00\x00"}


def test_packed_interpreter_is_reproducible(packed: artifacts.Interpreter, tmp_path: Path) -> None:
    """Packed again in another folder under another umask, it has the same digest."""
    if not Path(packed.origin).is_file():
        pytest.skip(f"the cached interpreter comes from {packed.origin}")
    candidate = interpreters.examine(Path(packed.origin))
    assert isinstance(candidate, interpreters.Candidate)
    before = os.umask(0o077)
    try:
        packing.pack(candidate, tmp_path / "again.tar.gz")
    finally:
        os.umask(before)
    assert tarball.sha256_of(tmp_path / "again.tar.gz") == packed.sha256


def test_packing_half_an_interpreter_is_found_out(packed: artifacts.Interpreter, tree: Path, tmp_path: Path) -> None:
    """Without its extension modules a pack still runs here, on the build's own prefix: the proof sees where it read from."""
    half = tmp_path / "half"
    shutil.copytree(tree, half, ignore=shutil.ignore_patterns("lib-dynload"))
    tarball.pack(half, tmp_path / "half.tar.gz", level=1)
    with pytest.raises(ArtifactError, match="does not run from another folder"):
        packing.prove(tmp_path / "half.tar.gz", version=packed.version)


def executable_stack(path: Path) -> None:
    """Set PF_X on a file's PT_GNU_STACK, as the broken releases have it."""
    with path.open("r+b") as stream:
        file = ELFFile(stream)
        index = next(n for n, segment in enumerate(file.iter_segments()) if segment["p_type"] == "PT_GNU_STACK")
        stream.seek(file["e_phoff"] + index * file["e_phentsize"] + 4)
        stream.write((7).to_bytes(4, "little"))


def test_packing_refuses_an_executable_stack(packed: artifacts.Interpreter, tree: Path, tmp_path: Path) -> None:
    """One library that asks for it is enough, and is named; nothing is cached."""
    bad = tmp_path / "bad"
    shutil.copytree(tree, bad)
    library = next((bad / "lib").glob("libz.so*"))
    executable_stack(library)
    tarball.pack(bad, tmp_path / "bad.tar.gz", level=1)
    with pytest.raises(ArtifactError, match=r"lib/libz.so.* asks for an executable stack") as caught:
        artifacts.interpreter(arch=HOST, cache=tmp_path / "cache", source=tmp_path / "bad.tar.gz")
    assert caught.value.code == "executable-stack"
    assert list((tmp_path / "cache" / "interpreters").iterdir()) == []


def test_elf_refuses_what_is_no_elf(tmp_path: Path) -> None:
    """A text that starts like an ELF file is an error that names the file, not a traceback."""
    (tmp_path / "x.so").write_bytes(b"\x7fELF and then nothing")
    with pytest.raises(ArtifactError, match=r"x\.so is not a readable ELF file"):
        elf.read(tmp_path / "x.so")


# What the caller names


def test_interpreter_named_wrongly_is_said(tmp_path: Path) -> None:
    """A path that is nothing, a folder without a Python, an archive of something else, and an unknown architecture."""
    (tmp_path / "other").mkdir()
    (tmp_path / "file").write_text("x")
    tarball.pack(tmp_path / "other", tmp_path / "other.tar.gz")
    for source, text in (
        (tmp_path / "nothing", "is no interpreter and no archive"),
        (tmp_path / "other", "is no interpreter and no archive"),
        (tmp_path / "file", "does not run"),
        (tmp_path / "other.tar.gz", "holds no CPython"),
    ):
        with pytest.raises(ArtifactError, match=text):
            artifacts.interpreter(arch=HOST, cache=tmp_path / "cache", source=source)
    with pytest.raises(UsageError, match="riscv64"):
        artifacts.interpreter(arch="riscv64")


def test_interpreter_of_another_architecture_needs_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This host cannot pack for another: the error says which ways there are."""
    monkeypatch.setenv("BOXSTRAP_INTERPRETER", "host")
    foreign = "aarch64" if HOST == "x86_64" else "x86_64"
    with pytest.raises(ArtifactError, match=rf"No Python for {foreign}.*--interpreter FILE.tar.gz"):
        artifacts.interpreter(arch=foreign, cache=tmp_path)


# python-build-standalone, from a mirror on this host


class Mirror(http.server.ThreadingHTTPServer):
    """Serves files by name, and remembers what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.silent = False
        super().__init__(("127.0.0.1", 0), _Serve)

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.server_port}"


class _Serve(http.server.BaseHTTPRequestHandler):
    server: Mirror

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.server.silent:
            self.rfile.read()  # until the client goes
            return
        body = self.server.files.get(self.path.rpartition("/")[2])
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
        pass


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    """A mirror that PBS_INSTALLER_BASE_URL names."""
    with Mirror() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("PBS_INSTALLER_BASE_URL", server.url)
        monkeypatch.delenv("BOXSTRAP_INTERPRETER", raising=False)
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield server
        server.shutdown()


@pytest.fixture
def release(tree: Path, packed: artifacts.Interpreter, mirror: Mirror, tmp_path: Path) -> standalone.Release:
    """A hand-made archive in the form of python-build-standalone, on the mirror: python/, with links, without bytecode."""
    name = f"cpython-{packed.version}%2B20260602-{HOST}-unknown-linux-gnu-install_only_stripped.tar.gz"
    with tarfile.open(tmp_path / "pbs.tar.gz", "w:gz", compresslevel=1) as tar:

        def keep(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
            return None if member.name.endswith(("__pycache__", "bin/python3")) else member

        tar.add(tree, "python", filter=keep)
        tar.add(tree / "bin" / "python3", f"python/bin/python{packed.minor}")
        link = tarfile.TarInfo("python/bin/python3")
        link.type, link.linkname = tarfile.SYMTYPE, f"python{packed.minor}"
        tar.addfile(link)
    mirror.files[name] = (tmp_path / "pbs.tar.gz").read_bytes()
    return standalone.Release(f"{mirror.url}/{name}", tarball.sha256_of(tmp_path / "pbs.tar.gz"), packed.version)


def index_of(release: standalone.Release) -> Callable[..., object]:
    """Stand in for pbs-installer's index, which cannot know a hand-made archive."""

    def get_download_link(request: str, *_: object, **__: object) -> tuple[object, tuple[str, str]]:
        if not release.version.startswith(request):
            raise ValueError(request)
        micro = int(release.version.rpartition(".")[2])
        return type("Version", (), {"micro": micro}), (release.url, release.sha256)

    return get_download_link


def test_standalone_is_preferred_where_it_can_be_reached(
    release: standalone.Release, mirror: Mirror, packed: artifacts.Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is fetched, checked, packed and proved like any other; the second time nothing is asked of the network."""
    monkeypatch.setattr(standalone, "get_download_link", index_of(release))
    said: list[str] = []
    first = artifacts.interpreter(arch=HOST, cache=tmp_path / "cache", report=said.append)
    assert first.origin == "python-build-standalone 20260602"
    assert (first.version, first.arch) == (packed.version, HOST)
    assert first.sha256 == packed.sha256 or not Path(packed.origin).is_file()
    assert any("downloading" in sentence for sentence in said)
    asked = len(mirror.asked)
    assert artifacts.interpreter(arch=HOST, cache=tmp_path / "cache") == first
    assert len(mirror.asked) == asked == 2


def test_standalone_wrong_bytes_are_refused(mirror: Mirror, tmp_path: Path) -> None:
    """A mirror that serves something else is an error that names both digests, not a reason to fall back in silence."""
    wanted = standalone.newest(HOST)
    assert wanted is not None
    mirror.files[wanted.url.rpartition("/")[2]] = b"something else"
    with pytest.raises(ArtifactError, match=rf"needed {wanted.sha256[:16]}.*PBS_INSTALLER_BASE_URL"):
        artifacts.interpreter(arch=HOST, cache=tmp_path)


def test_standalone_out_of_reach_is_asked_once(mirror: Mirror, tmp_path: Path) -> None:
    """The mirror has no such file: the next runs do not ask again for a while, and `standalone` always does."""
    foreign = "aarch64" if HOST == "x86_64" else "x86_64"
    for _ in range(3):
        with pytest.raises(ArtifactError, match="was not reached"):
            artifacts.interpreter(arch=foreign, cache=tmp_path)
    assert len(mirror.asked) == 1
    with pytest.raises(ArtifactError, match="cannot be reached"):
        artifacts.interpreter(arch=foreign, cache=tmp_path, source="standalone")
    assert len(mirror.asked) == 2


def test_standalone_silent_mirror_costs_a_bounded_wait(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts and says nothing is out of reach."""
    monkeypatch.setattr(standalone, "PROBE_TIMEOUT_S", 0.2)
    mirror.silent = True
    assert not standalone.reachable(f"{mirror.url}/x")


def test_standalone_broken_releases_are_never_chosen(release: standalone.Release, tmp_path: Path) -> None:
    """The real index holds some of them (3.13.12 of 20260325): they are skipped, and fetching one is refused."""
    for arch in artifacts.ARCHITECTURES:
        for minor in interpreters.MINORS:
            chosen = standalone.newest(arch, minors=(minor,))
            assert chosen is not None
            assert chosen.date
            assert not chosen.refused
    for date, refused in (("20260319", False), ("20260320", True), ("20260407", True), ("20260408", False)):
        dated = replace(release, url=release.url.replace("20260602", date))
        assert dated.refused is refused
        if refused:
            with pytest.raises(ArtifactError, match="executable stack"):
                standalone.fetch(dated, tmp_path / "never")


def test_standalone_for_another_architecture_is_compiled_here(
    packed: artifacts.Interpreter, tree: Path, tmp_path: Path
) -> None:
    """A foreign archive gets its bytecode from a Python of this host and is not run; the facts are those of its files."""
    source = tmp_path / "foreign.tar.gz"
    tarball.pack(tree, source, level=1)
    store = Cache(tmp_path / "cache")
    asked: list[str] = []

    def compiler(minor: str) -> Path:
        asked.append(minor)
        return interpreter_sources.compiler(store, minor, tmp_path / "unused")

    (tmp_path / "out").mkdir()
    facts = packing.repack(source, tmp_path / "out" / "x.tar.gz", origin="x", host="another", compiler=compiler)
    assert asked == [packed.minor]
    assert facts["version"] == packed.version
    assert tarball.sha256_of(tmp_path / "out" / "x.tar.gz") == packed.sha256


# Unpacking


@pytest.mark.parametrize("kind", ["parent", "absolute", "symlink", "hardlink", "device"])
def test_unpack_refuses_members_that_leave_the_folder(tmp_path: Path, kind: str) -> None:
    """An archive from a mirror is not trusted with paths, on every Python that the host may have."""
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        member = tarfile.TarInfo({"parent": "../evil", "absolute": str(tmp_path / "evil")}.get(kind, "evil"))
        if kind == "symlink":
            member.type, member.linkname = tarfile.SYMTYPE, "../.."
        elif kind == "hardlink":
            member.type, member.linkname = tarfile.LNKTYPE, "../x.tar"
        elif kind == "device":
            member.type = tarfile.CHRTYPE
        tar.addfile(member)
    with pytest.raises(ArtifactError, match=r"x\.tar could not be unpacked"):
        tarball.unpack(tmp_path / "x.tar", tmp_path / "in")
    assert not (tmp_path / "evil").exists()
    assert not os.path.lexists(tmp_path / "in" / "evil")
