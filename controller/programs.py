# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Agents that are programs and no Python packages: a file of this host, a URL with its sha256, or npm packages from a lock.

The program is packed as bin/<name>, as it is. `requirements/<agent>.json` is the lock: for each architecture the npm packages
with their `dist.integrity`, and the one file that is taken from each. It refuses "latest", bytes without a digest, files
of another architecture or for musl, and to accept a licence in the user's name.
"""

from __future__ import annotations

import json
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from boxstrap.controller import download, elf, npm, tarball
from boxstrap.controller.cache import Cache, Entry, code_of, key_of
from boxstrap.controller.errors import ArtifactError, UsageError
from boxstrap.controller.payloads import REQUIREMENTS

LICENSED = {"pool": "Poolside's EULA"}
"""Programs that nobody may run without accepting something; all of them are given by file or URL."""
_DEBIAN_NAMES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, kw_only=True)
class Program:
    """Which program the user means: a path or URL, what it must hash to (hex; a URL needs it), and a licence accepted."""

    source: str = ""
    sha256: str = ""
    accept_eula: bool = False


def is_program(agent: str) -> bool:
    """Tell whether an agent's payload is a program."""
    return agent in LICENSED or _lock_file(agent).is_file()


def known() -> set[str]:
    """Name the agents that are programs."""
    return set(LICENSED) | {path.stem for path in REQUIREMENTS.glob("*.json")}


def members(agent: str, arch: str, program: Program) -> tuple[str, ...]:
    """Name the programs in the payload, for the smoke run: each is asked for its version before it is published."""
    locked = [] if program.source or not _lock_file(agent).is_file() else _locked(agent, arch)
    return tuple(f"bin/{Path(entry['member']).name}" for entry in locked) or (f"bin/{agent}",)


def find(store: Cache, agent: str, arch: str, program: Program) -> Entry:
    """Find or build the payload of a program for an architecture.

    Raises:
        UsageError: the licence is not accepted, or it is not said which program is meant.
        ArtifactError: it could not be fetched, is not what it should be, or is not for this architecture.
    """
    if agent in LICENSED and not program.accept_eula:
        raise UsageError(
            f"Running {agent} means accepting {LICENSED[agent]}, and nobody has said so.",
            remedy="Read it, then say --accept-eula (accept_eula in a SessionSpec's program).",
            code="eula",
        )
    inputs: dict[str, object] = {"recipe": code_of(__name__), "agent": agent, "arch": arch}
    if program.source:
        inputs["sha256"] = _digest(program)
    elif _lock_file(agent).is_file():
        inputs["lock"] = _locked(agent, arch)
    else:
        raise UsageError(
            f"It is not said which {agent} is meant.", remedy="Give --program FILE, or a URL and --program-sha256."
        )

    def build(target: Path) -> Mapping[str, str]:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="program-") as folder:
            tree = Path(folder, "tree")
            (tree / "bin").mkdir(parents=True)
            if program.source:
                _take(store, program, agent, arch, tree / "bin", Path(folder, "work"))
            else:
                for entry in _locked(agent, arch):
                    _from_npm(store, entry, tree / "bin", Path(folder, "work"))
            for path in elf.walk(tree):
                _judge(path, arch)
            elf.refuse_executable_stacks(tree)
            floor = elf.glibc_floor(elf.walk(tree))
            return {"glibc_floor": floor, "unpacked_bytes": str(tarball.pack(tree, target))}

    return store.get("payloads", key_of(inputs), f"{agent}.tar.gz", build)


def _lock_file(agent: str) -> Path:
    return REQUIREMENTS / f"{agent}.json"


def _locked(agent: str, arch: str) -> list[dict[str, str]]:
    lock: dict[str, list[dict[str, str]]] = json.loads(_lock_file(agent).read_bytes())
    if arch not in lock:
        raise ArtifactError(f"{_lock_file(agent).name} locks no {agent} for {arch}, found {', '.join(lock)}.")
    return lock[arch]


def _digest(program: Program) -> str:
    """Return what identifies the program without fetching it."""
    if _is_url(program.source):
        if len(program.sha256) != 64 or not set(program.sha256.lower()) <= set("0123456789abcdef"):
            raise UsageError(
                f"A program from a URL needs the sha256 that it must have, found {program.sha256!r}.",
                remedy="Give --program-sha256 with 64 hex digits.",
            )
        return program.sha256.lower()
    path = Path(program.source).expanduser()
    if not path.is_file():
        raise UsageError(f"{path} is no file, needed the program or the archive that holds it.", remedy="Check --program.")
    found = tarball.sha256_of(path)
    if program.sha256 and program.sha256.lower() != found:
        raise download.corrupt(path.name, found, program.sha256.lower())
    return found


def _is_url(source: str) -> bool:
    return urlsplit(source).scheme in {"http", "https"}


def _take(store: Cache, program: Program, agent: str, arch: str, into: Path, work: Path) -> None:
    """Put the program of a file or URL into a folder; it is the file itself, or the only such file in an archive."""
    source = Path(program.source).expanduser()
    if _is_url(program.source):
        source = work.with_name("download")
        store.report(f"downloading {agent}")
        found = download.fetch(program.source, source, what=agent)
        if found != program.sha256.lower():
            raise download.corrupt(f"What came for {agent}", found, program.sha256.lower())
    if tarfile.is_tarfile(source):
        tarball.unpack(source, work)
        names = {agent, f"{agent}-linux-{_DEBIAN_NAMES[arch]}", f"{agent}-linux-{arch}"}
        candidates = [path for path in sorted(work.rglob("*")) if path.is_file() and path.name in names]
        if len(candidates) != 1:
            raise ArtifactError(f"{source.name} holds {len(candidates)} files called {' or '.join(sorted(names))}, needed one.")
        source = candidates[0]
    shutil.copyfile(source, into / agent)
    (into / agent).chmod(0o755)


def _from_npm(store: Cache, entry: Mapping[str, str], into: Path, work: Path) -> None:
    """Take the one file of a locked package."""
    store.report(f"fetching {entry['package']}@{entry['version']} from the npm registry")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    tarball.unpack(npm.fetch(entry["package"], entry["version"], entry["integrity"], into=work), work / "unpacked")
    target = into / Path(entry["member"]).name
    shutil.move(work / "unpacked" / entry["member"], target)
    target.chmod(0o755)


def _judge(path: Path, arch: str) -> None:
    """Refuse what a box of this architecture cannot run; what is no ELF file, only the smoke run can judge."""
    facts = elf.read(path)
    if facts.arch != arch:
        raise ArtifactError(
            f"{path.name} is for {facts.arch}, needed {arch}.", remedy="Give the program for the box's machine."
        )
    if "musl" in facts.loader:
        raise ArtifactError(f"{path.name} is linked to musl ({facts.loader}), needed glibc.", remedy="Give the glibc build.")
