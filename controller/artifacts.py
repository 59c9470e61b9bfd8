# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The three things that are pushed: interpreter, payload, archive. Found in the cache, else built, always verified.

It refuses to hand out bytes that do not hash to what was recorded when they were proved.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from boxstrap.controller import archives, interpreter_sources, payloads, programs, tarball
from boxstrap.controller.cache import Cache, Entry, Reporter, key_of
from boxstrap.controller.errors import UsageError
from boxstrap.controller.interpreter_sources import host_arch
from boxstrap.runner import wire

ARCHITECTURES = ("x86_64", "aarch64")
SOURCE_VARIABLE = "BOXSTRAP_INTERPRETER"
"""Environment variable that names the interpreter's source like `--interpreter`: a path, "host" or "standalone"."""


@dataclass(frozen=True)
class Interpreter:
    """A portable CPython as .tar.gz (bin/, lib/). `unpacked_bytes` counts 4 KiB blocks, as a disk does."""

    path: Path
    sha256: str
    version: str
    arch: str
    glibc_floor: str
    unpacked_bytes: int
    origin: str = ""

    @property
    def minor(self) -> str:
        """The version without its last part: "3.13"."""
        return self.version.rpartition(".")[0]


@dataclass(frozen=True)
class Payload:
    """An agent's tree as .tar.gz, unpacked into site/.

    `smoke` are modules that must import before it is published, and programs (with a slash) that must print their version.
    """

    path: Path
    sha256: str
    agent: str
    variant: str
    arch: str
    python: str
    glibc_floor: str
    unpacked_bytes: int
    smoke: tuple[str, ...]


@dataclass(frozen=True)
class Archive:
    """The one file of our own code: `cat prelude.sh app.pyz`."""

    path: Path
    sha256: str


def interpreter(
    *, arch: str, cache: Path | None = None, report: Reporter | None = None, source: str | Path | None = None
) -> Interpreter:
    """Find or build the interpreter for an architecture.

    Args:
        arch: "x86_64" or "aarch64", the box's.
        cache: the cache folder; the user's own by default.
        report: gets one sentence for each slow or surprising step.
        source: a Python on this host, a .tar.gz, "host" or "standalone"; by default what BOXSTRAP_INTERPRETER says.

    Raises:
        ArtifactError: there is none, or what was built does not run.
        UsageError: there are no boxes of this architecture.
    """
    if arch not in ARCHITECTURES:
        raise UsageError(f"There is no interpreter for {arch!r}.", remedy=f"Needed one of: {', '.join(ARCHITECTURES)}.")
    wanted = str(source or os.environ.get(SOURCE_VARIABLE) or "")
    entry = interpreter_sources.find(Cache(cache, report=report), arch, wanted)
    return Interpreter(
        path=entry.path,
        sha256=entry.sha256,
        version=entry.facts["version"],
        arch=entry.facts["arch"],
        glibc_floor=entry.facts["glibc_floor"],
        unpacked_bytes=int(entry.facts["unpacked_bytes"]),
        origin=entry.facts["origin"],
    )


def payload(
    agent: str,
    *,
    variant: str = "lean",
    interpreter: Interpreter,
    program: programs.Program | None = None,
    cache: Path | None = None,
    report: Reporter | None = None,
) -> Payload | None:
    """Find or build an agent's payload for an interpreter; None when the agent needs nothing installed.

    `program` says which program is meant, for agents that are programs.

    Raises:
        ArtifactError: it could not be built or fetched, or does not import under the interpreter.
        UsageError: there is no such agent or variant, or what is said of the program does not do.
    """
    if agent in payloads.NEEDS_NONE or variant == "none":
        return None
    store = Cache(cache, report=report)
    if programs.is_program(agent):
        wanted = program or programs.Program()
        smoke = programs.members(agent, interpreter.arch, wanted)
        return _payload(programs.find(store, agent, interpreter.arch, wanted), agent, variant, interpreter, smoke)
    recipe = payloads.recipe_for(agent, variant)
    native = interpreter.arch == host_arch()

    def build(target: Path) -> Mapping[str, str]:
        store.report(f"building the {variant} payload of {agent} for {interpreter.arch} and Python {interpreter.minor}")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="python-") as folder:
            python = Path(folder, "bin", "python3")
            if native:
                tarball.unpack(interpreter.path, Path(folder))
            else:
                python = interpreter_sources.compiler(store, interpreter.minor, Path(folder))
                store.report(f"the {interpreter.arch} payload is not tried here: this host is {host_arch()}")
            return payloads.build(recipe, target, arch=interpreter.arch, minor=interpreter.minor, compiler=python, smoke=native)

    inputs = {**payloads.inputs_of(recipe), "arch": interpreter.arch, "python": interpreter.version}
    entry = store.get("payloads", key_of(inputs), f"{agent}-{variant}.tar.gz", build)
    return _payload(entry, agent, variant, interpreter, recipe.smoke)


def _payload(entry: Entry, agent: str, variant: str, interpreter: Interpreter, smoke: tuple[str, ...]) -> Payload:
    return Payload(
        path=entry.path,
        sha256=entry.sha256,
        agent=agent,
        variant=variant,
        arch=interpreter.arch,
        python=interpreter.minor,
        glibc_floor=entry.facts["glibc_floor"],
        unpacked_bytes=int(entry.facts["unpacked_bytes"]),
        smoke=smoke,
    )


def archive(*, cache: Path | None = None, report: Reporter | None = None, package: Path | None = None) -> Archive:
    """Find or build the archive of our sandbox-side code; a checkout's dist/boxstrap.pyz is brought up to date too.

    Raises:
        ArtifactError: the sources are incomplete, or shiv is missing.
    """
    root = package or archives.package_root()
    store = Cache(cache, report=report)
    entry = store.get("archives", key_of(archives.inputs_of(root)), "boxstrap.pyz", lambda target: archives.build(root, target))
    if package is None:
        archives.publish(entry.path, entry.sha256)
    return Archive(entry.path, entry.sha256)


def runtime_digest(interpreter: Interpreter, payload: Payload | None, archive: Archive) -> str:
    """Name a runtime by what it is made of, as the box does."""
    return wire.runtime_digest(
        interpreter=interpreter.sha256,
        payload=payload.sha256 if payload else None,
        arch=interpreter.arch,
        archive=archive.sha256,
    )
