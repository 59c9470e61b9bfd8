# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Where an interpreter comes from, first that applies.

What the caller names · python-build-standalone, cached or reachable (glibc 2.17, so the most boxes can run it) · one packed
from this host, whose floor is this host's. A failed probe is remembered for a while, so that a host without that network does
not wait at each start. It refuses to fall back in silence: what was chosen instead is reported.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from hashlib import sha256
from importlib.metadata import version as installed_version
from pathlib import Path

from boxstrap.controller import interpreters, packing, tarball
from boxstrap.controller.cache import Cache, Entry, code_of, key_of
from boxstrap.controller.errors import ArtifactError

UNREACHABLE_FOR_S = 900.0
"""Seconds for which a failed probe for python-build-standalone is believed."""
FILE = "python.tar.gz"


def arch_of(machine: str) -> str:
    """Name an architecture as boxes do."""
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine.lower())


def host_arch() -> str:
    """Name this machine's architecture as boxes do; a host that is no Linux runs no box's files, and says so by its name."""
    machine = platform.machine()
    return arch_of(machine) if sys.platform == "linux" else f"{sys.platform}-{machine.lower()}"


def find(store: Cache, arch: str, wanted: str = "") -> Entry:
    """Find or build an interpreter; `wanted` is "", "host", "standalone", or a path.

    Raises:
        ArtifactError: there is none, or what was built does not run.
    """
    if wanted not in {"", "host", "standalone"}:
        return _named(store, Path(wanted).expanduser(), arch)
    entry = None if wanted == "host" else _standalone(store, arch, insist=wanted == "standalone")
    if entry is None and arch == host_arch():
        entry = _packed(store)
    if entry is None:
        raise ArtifactError(
            f"No Python for {arch} was found: python-build-standalone was not reached, and this host is {host_arch()}.",
            remedy="Give one with --interpreter FILE.tar.gz, or a mirror in PBS_INSTALLER_BASE_URL.",
        )
    return entry


def compiler(store: Cache, minor: str, folder: Path) -> Path:
    """Give a Python of this minor that runs on this host: the packed one, unpacked into `folder`, or any other.

    Raises:
        ArtifactError: there is none.
    """
    if sys.implementation.name == "cpython" and minor == f"{sys.version_info.major}.{sys.version_info.minor}":
        return Path(sys.executable)
    for _, found in interpreters.survey():
        if isinstance(found, interpreters.Candidate) and found.minor == minor:
            return found.executable
    native = find(store, host_arch())
    if not native.facts["version"].startswith(f"{minor}."):
        raise ArtifactError(
            f"Compiling for Python {minor} needs one that runs on this host, found {native.facts['version']}.",
            remedy=f"Install one: uv python install {minor}.",
        )
    tarball.unpack(native.path, folder)
    return folder / "bin" / "python3"


def _recipe() -> dict[str, object]:
    return {"recipe": code_of(packing.__name__, interpreters.__name__), "strip": shutil.which("strip") is not None}


def _standalone(store: Cache, arch: str, *, insist: bool) -> Entry | None:
    key = key_of({**_recipe(), "standalone": installed_version("pbs-installer"), "arch": arch})
    found = store.find("interpreters", key, FILE)
    if found:
        return found
    mirror = os.environ.get("PBS_INSTALLER_BASE_URL") or ""
    memory = store.root / f"unreachable-{sha256(mirror.encode()).hexdigest()[:16]}"
    if not insist and memory.is_file() and 0 <= time.time() - memory.stat().st_mtime < UNREACHABLE_FOR_S:
        return None
    from boxstrap.controller import standalone  # noqa: PLC0415  # its index and HTTP client cost 0.2 s, and only here

    release = standalone.newest(arch)
    if release is None or not standalone.reachable(release.url):
        if insist:
            raise ArtifactError("python-build-standalone cannot be reached.", remedy="Name a mirror in PBS_INSTALLER_BASE_URL.")
        store.report("python-build-standalone cannot be reached")
        store.root.mkdir(parents=True, exist_ok=True)
        memory.touch()
        return None

    def build(target: Path) -> Mapping[str, str]:
        store.report(f"downloading Python {release.version} (python-build-standalone {release.date})")
        download = target.with_name("download.tar.gz")
        standalone.fetch(release, download)
        try:
            return _repack(store, download, target, origin=f"python-build-standalone {release.date}")
        finally:
            download.unlink()

    try:
        return store.get("interpreters", key, FILE, build)
    except ArtifactError as error:
        if insist or error.code != "unreachable":
            raise
        store.report(f"{error} Taking an interpreter of this host instead.")
        memory.touch()
        return None


def _repack(store: Cache, source: Path, target: Path, *, origin: str) -> Mapping[str, str]:
    """Pack a ready-made archive; another architecture's is compiled by a Python of this host."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="compiler-") as folder:
        return packing.repack(
            source, target, origin=origin, host=host_arch(), compiler=lambda minor: compiler(store, minor, Path(folder))
        )


def _named(store: Cache, path: Path, arch: str) -> Entry:
    """Use what the caller named: a file that is an interpreter, a folder that holds one, or an archive."""
    if path.is_dir():
        names = [path / "bin" / name for name in (*(f"python{minor}" for minor in interpreters.MINORS), "python3")]
        path = next((name for name in names if name.is_file()), path)
    if not path.is_file():
        raise ArtifactError(f"{path} is no interpreter and no archive.", remedy="Give --interpreter a Python or a .tar.gz.")
    if path.name.endswith((".tar.gz", ".tgz", ".tar")):
        key = key_of({**_recipe(), "archive": tarball.sha256_of(path), "compiler": host_arch()})
        entry = store.get("interpreters", key, FILE, lambda target: _repack(store, path, target, origin=path.name))
    else:
        candidate = interpreters.examine(path)
        if isinstance(candidate, str):
            raise ArtifactError(f"{path} {candidate}.", remedy=f"Needed: CPython {' or '.join(interpreters.MINORS)}.")
        entry = _pack(store, candidate)
    if entry.facts["arch"] != arch:
        raise ArtifactError(f"{path} is for {entry.facts['arch']}, needed {arch}.", remedy="Name another with --interpreter.")
    return entry


def _packed(store: Cache) -> Entry:
    """Pack the best Python of this host; which one that is, is remembered until a candidate appears, goes or changes."""

    def choose(target: Path) -> Mapping[str, str]:
        store.report("looking for a Python on this host")
        surveyed = list(interpreters.survey())
        candidates = [found for _, found in surveyed if isinstance(found, interpreters.Candidate)]
        if not candidates:
            seen = "; ".join(f"{path} {found}" for path, found in surveyed) or "nothing on PATH is called python3"
            raise ArtifactError(
                f"No CPython {' or '.join(interpreters.MINORS)} was found to pack: {seen}.",
                remedy="Install one (uv python install 3.13, pyenv install 3.13) or name one with --interpreter.",
            )
        target.write_text(json.dumps(interpreters.to_json(interpreters.best(candidates))))
        return {}

    places = [_stat(path) for path in interpreters.places()]
    choice = store.get("choices", key_of({**_recipe(), "places": places}), "candidate.json", choose)
    return _pack(store, interpreters.from_json(json.loads(choice.path.read_bytes())))


def _pack(store: Cache, candidate: interpreters.Candidate) -> Entry:
    files = [candidate.executable, candidate.stdlib / "os.py", *(path for _, path in candidate.libraries)]

    def build(target: Path) -> Mapping[str, str]:
        store.report(f"packing Python {candidate.version} (glibc {candidate.floor}) from {candidate.executable}")
        return packing.pack(candidate, target)

    return store.get("interpreters", key_of({**_recipe(), "host": [_stat(path) for path in files]}), FILE, build)


def _stat(path: Path) -> tuple[str, str, int, int]:
    """Tell a file from its next version without reading it."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return str(path), "", 0, 0
    return str(path), os.path.realpath(path), found.st_size, found.st_mtime_ns
