# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Agents that are programs: what is fetched is held to its hash, kept, and refused where it cannot run or was not accepted."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from boxstrap.controller import artifacts, npm, programs, tarball
from boxstrap.controller.artifacts import Interpreter
from boxstrap.controller.cache import Cache
from boxstrap.controller.errors import ArtifactError, BoxstrapError, UsageError
from boxstrap.controller.programs import Program

SCRIPT = b"#!/bin/sh\necho a program\n"
DIGEST = hashlib.sha256(SCRIPT).hexdigest()
E_MACHINE, AARCH64, X86_64 = 18, 183, 62


class Served(list[str]):
    """The paths that were asked for, and where they are served."""

    url = ""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A web server for the folder `www`."""
    (tmp_path / "www").mkdir()
    asked = Served()

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class names it)
            asked.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "www")))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    asked.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield asked
    server.shutdown()
    server.server_close()


@pytest.fixture
def store(tmp_path: Path) -> Cache:
    """An empty cache."""
    return Cache(tmp_path / "cache")


def find(store: Cache, program: Program, *, arch: str = "x86_64") -> dict[str, bytes]:
    """Build pool's payload, and read what is in it."""
    entry = programs.find(store, "pool", arch, program)
    with tarfile.open(entry.path) as tar:
        files = {member.name: tar.extractfile(member) for member in tar if member.isreg()}
        return {name: file.read() for name, file in files.items() if file is not None}


def accepted(source: object, sha256: str = "") -> Program:
    """Name a program whose licence was accepted."""
    return Program(source=str(source), sha256=sha256, accept_eula=True)


def test_licence_that_nobody_accepted_is_refused_before_anything_is_fetched(store: Cache, served: Served) -> None:
    with pytest.raises(UsageError, match="accepting Poolside's EULA") as caught:
        programs.find(store, "pool", "x86_64", Program(source=f"{served.url}/pool", sha256=DIGEST))
    assert (caught.value.code, served) == ("eula", [])


def test_program_that_is_not_named_is_asked_for(store: Cache) -> None:
    with pytest.raises(UsageError, match="which pool is meant"):
        programs.find(store, "pool", "x86_64", Program(accept_eula=True))


def test_url_is_fetched_once_and_held_to_its_sha256(store: Cache, served: Served, tmp_path: Path) -> None:
    (tmp_path / "www" / "pool").write_bytes(SCRIPT)
    program = accepted(f"{served.url}/pool", DIGEST.upper())
    assert find(store, program) == find(store, program) == {"bin/pool": SCRIPT}
    assert served == ["/pool"]


@pytest.mark.parametrize("sha256", ["", "latest", "0" * 63, "g" * 64])
def test_url_without_a_sha256_is_refused(store: Cache, served: Served, sha256: str) -> None:
    with pytest.raises(UsageError, match="sha256"):
        find(store, accepted(f"{served.url}/pool", sha256))
    assert served == []


def test_bytes_that_are_not_the_expected_ones_are_not_kept(store: Cache, served: Served, tmp_path: Path) -> None:
    (tmp_path / "www" / "pool").write_bytes(SCRIPT + b"# and more\n")
    with pytest.raises(ArtifactError, match="needed") as caught:
        find(store, accepted(f"{served.url}/pool", DIGEST))
    assert caught.value.code == "upload-corrupt"
    assert list((tmp_path / "cache" / "payloads").iterdir()) == []
    (tmp_path / "pool").write_bytes(SCRIPT)
    with pytest.raises(ArtifactError, match="needed"):
        find(store, accepted(tmp_path / "pool", "0" * 64))


def test_url_that_answers_nothing_good_is_named_unreachable(store: Cache, served: Served) -> None:
    with pytest.raises(ArtifactError, match="404") as caught:
        find(store, accepted(f"{served.url}/nothing", DIGEST))
    assert caught.value.code == "unreachable"


def test_archive_gives_the_one_program_in_it(store: Cache, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "README").write_text("read me")
    (folder / "pool-linux-amd64").write_bytes(SCRIPT)
    archive = tmp_path / "pool.tar.gz"
    tarball.pack(folder, archive)
    assert find(store, accepted(archive)) == {"bin/pool": SCRIPT}
    with pytest.raises(ArtifactError, match="pool-linux-arm64"):
        find(store, accepted(archive), arch="aarch64")


@pytest.mark.parametrize("source", ["/nonexistent/pool", "/tmp"])
def test_file_that_is_none_is_refused(store: Cache, source: str) -> None:
    with pytest.raises(UsageError, match="is no file"):
        find(store, accepted(source))


def test_program_for_another_machine_is_refused(store: Cache, tmp_path: Path) -> None:
    """Which one the file is for is read from it, never believed from its name."""
    binary = bytearray(Path(shutil.which("true") or "/bin/true").read_bytes())
    machine = int.from_bytes(binary[E_MACHINE : E_MACHINE + 2], "little")
    arch = {X86_64: "aarch64", AARCH64: "x86_64"}[machine]
    (tmp_path / "pool").write_bytes(binary)
    with pytest.raises(ArtifactError, match=f"needed {arch}"):
        find(store, accepted(tmp_path / "pool"), arch=arch)


def test_program_for_musl_is_refused(store: Cache, tmp_path: Path) -> None:
    binary = Path(shutil.which("true") or "/bin/true").read_bytes()
    arch = "x86_64" if binary[E_MACHINE] == X86_64 else "aarch64"
    loader = b"/lib64/ld-linux-x86-64.so.2" if arch == "x86_64" else b"/lib/ld-linux-aarch64.so.1"
    musl = f"/lib/ld-musl-{arch}.so.1".encode()[: len(loader)].ljust(len(loader), b"\0")
    assert loader in binary
    (tmp_path / "pool").write_bytes(binary.replace(loader, musl))
    with pytest.raises(ArtifactError, match="musl"):
        find(store, accepted(tmp_path / "pool"), arch=arch)


@pytest.fixture
def package(tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch) -> str:
    """A registry with one package, on a host without npm; returns the package's integrity."""
    folder = tmp_path / "in"
    (folder / "package" / "bin").mkdir(parents=True)
    (folder / "package" / "bin" / "tool").write_bytes(SCRIPT)
    target = tmp_path / "www" / "@scope" / "tool" / "-" / "tool-1.0.0.tgz"
    target.parent.mkdir(parents=True)
    tarball.pack(folder, target)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", f"{served.url}/")
    return "sha512-" + base64.b64encode(hashlib.sha512(target.read_bytes()).digest()).decode()


def test_package_without_npm_comes_from_the_configured_registry(package: str, served: Served, tmp_path: Path) -> None:
    into = tmp_path / "into"
    into.mkdir()
    assert npm.fetch("@scope/tool", "1.0.0", package, into=into).is_file()
    assert served == ["/@scope/tool/-/tool-1.0.0.tgz"]


def test_package_that_is_not_the_locked_one_is_refused(package: str, tmp_path: Path) -> None:
    wrong = f"sha512-{package[-4:]}{package[11:]}"
    with pytest.raises(ArtifactError) as caught:
        npm.fetch("@scope/tool", "1.0.0", wrong, into=tmp_path)
    assert caught.value.code == "upload-corrupt"


def test_host_without_any_registry_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NPM_CONFIG_REGISTRY", raising=False)
    with pytest.raises(BoxstrapError, match="--program FILE"):
        npm.fetch("tool", "1.0.0", "sha512-", into=tmp_path)
    (tmp_path / ".npmrc").write_text("registry=http://127.0.0.1:9/\n")
    with pytest.raises(ArtifactError, match="could not be downloaded"):
        npm.fetch("tool", "1.0.0", "sha512-", into=tmp_path)


def test_lock_names_a_version_and_a_hash_for_each_machine() -> None:
    """Never "latest", and no host: the registry is the user's."""
    for path in programs.REQUIREMENTS.glob("*.json"):
        lock = json.loads(path.read_text(encoding="utf-8"))
        assert set(lock) == set(artifacts.ARCHITECTURES)
        for entry in [entry for entries in lock.values() for entry in entries]:
            assert set(entry) == {"package", "version", "integrity", "member"}
            assert entry["version"][0].isdigit()
            assert len(base64.b64decode(entry["integrity"].removeprefix("sha512-"), validate=True)) == 64
        assert "://" not in path.read_text(encoding="utf-8")


def test_payload_of_opencode_holds_what_it_would_fetch() -> None:
    """The real one, from the user's cache or fetched now: the program, and ripgrep, for which it would go to the network."""
    here = Interpreter(Path("-"), "0" * 64, "3.13.0", artifacts.host_arch(), "2.17", 0)
    payload = artifacts.payload("opencode", interpreter=here)
    assert payload is not None
    assert payload.smoke == ("bin/opencode", "bin/rg")
    with tarfile.open(payload.path) as tar:
        assert sorted(tar.getnames()) == ["bin", "bin/opencode", "bin/rg"]
