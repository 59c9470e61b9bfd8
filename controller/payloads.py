# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Agent payloads: a site-packages tree from hash-locked requirements, packed for one architecture and one Python minor.

uv fetches wheels only (never a source build), so that any architecture can be made on any host. It refuses to resolve
anything: what is not in the lock with a hash is not installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from boxstrap.controller import bytecode, elf, tarball
from boxstrap.controller.cache import code_of
from boxstrap.controller.errors import ArtifactError, UsageError

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"
TIMEOUT_S = 1800.0


_SMOKE = "import importlib, sys; sys.path.append(sys.argv[1]); [importlib.import_module(name) for name in sys.argv[2:]]"


@dataclass(frozen=True)
class Recipe:
    """How one agent's payload is made: its lock, what stands in for what, and what proves it.

    `platform` is the oldest glibc whose wheels are taken ("manylinux2014" is 2.17); `drop` are folders of the tree that
    no run reads.
    """

    lock: str
    platform: str
    smoke: tuple[str, ...]
    stand_ins: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()


RECIPES: Mapping[tuple[str, str], Recipe] = {
    ("nooa", "lean"): Recipe(
        lock="nooa-lean.txt",
        platform="manylinux2014",
        smoke=("nooa_bench.bench_agent",),
        stand_ins=("litellm",),
        drop=("nooa/viewer/frontend-react",),
    ),
    ("nooa", "full"): Recipe(
        lock="nooa-full.txt",
        platform="manylinux_2_28",
        smoke=("nooa_bench.bench_agent",),
        drop=("litellm/proxy/_experimental/out",),
    ),
}
NEEDS_NONE = {"command"}
"""Agents that need nothing installed."""

_UNWANTED_NAMES = {
    "RECORD",
    "INSTALLER",
    "REQUESTED",
    "WHEEL",
    "top_level.txt",
    "direct_url.json",
    "uv_cache.json",
    "py.typed",
    ".lock",
}
_UNWANTED_SUFFIXES = (".pyi", ".pyx", ".pxd", ".c", ".h", ".pth", ".a")
_PACKAGED_TESTS = {"tests", "test"}


def recipe_for(agent: str, variant: str) -> Recipe:
    """Find the recipe of an agent's variant.

    An agent that is not in the table has one variant, made from requirements/<agent>.txt; a line `# smoke: MODULE …` in
    its .in names what must import.

    Raises:
        UsageError: there is none.
    """
    if (agent, variant) in RECIPES:
        return RECIPES[agent, variant]
    if agent not in by_lock():
        known = ", ".join([*(f"{a} {v}" for a, v in RECIPES), *sorted(by_lock())])
        raise UsageError(f"There is no {variant!r} payload for the agent {agent!r}.", remedy=f"Known: {known}.")
    return Recipe(lock=f"{agent}.txt", platform="manylinux2014", smoke=_smoke_of(REQUIREMENTS / f"{agent}.in"))


def by_lock() -> set[str]:
    """Name the agents that need no more than their lock: requirements/<agent>.in, which says what to smoke, and .txt."""
    return {path.stem for path in REQUIREMENTS.glob("*.in") if path.with_suffix(".txt").is_file() and _smoke_of(path)}


def _smoke_of(source: Path) -> tuple[str, ...]:
    lines = source.read_text(encoding="utf-8").splitlines()
    return tuple(word for line in lines if line.startswith("# smoke:") for word in line.split()[2:])


def inputs_of(recipe: Recipe) -> dict[str, object]:
    """Return what a cache key must hold for a recipe: the content of its lock and of its stand-ins."""
    sources = [path for name in recipe.stand_ins for path in sorted((REQUIREMENTS / "stand_ins" / name).rglob("*.py"))]
    return {
        "recipe": code_of(__name__),
        "terms": repr(recipe),
        "lock": tarball.sha256_of(REQUIREMENTS / recipe.lock),
        "stand_ins": [(path.relative_to(REQUIREMENTS).as_posix(), tarball.sha256_of(path)) for path in sources],
        "strip": shutil.which("strip") is not None,
    }


def build(recipe: Recipe, target: Path, *, arch: str, minor: str, compiler: Path, smoke: bool) -> Mapping[str, str]:
    """Install the lock into a folder, trim, compile and pack it into `target` (.tar.gz).

    `compiler` is a Python of the same minor that runs here; with `smoke` the packed payload must import under it.

    Returns:
        Facts: glibc_floor, unpacked_bytes.

    Raises:
        ArtifactError: uv is missing or could not install the lock, or the agent does not import.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="payload-") as folder:
        site = Path(folder, "site")
        _install(recipe, site, arch=arch, minor=minor)
        for name in recipe.stand_ins:
            shutil.copytree(REQUIREMENTS / "stand_ins" / name, site / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in recipe.drop:
            shutil.rmtree(site / name, ignore_errors=True)
        _trim(site)
        for path in elf.walk(site):
            elf.strip(path)
        elf.refuse_executable_stacks(site)
        floor = elf.glibc_floor(elf.walk(site))
        bytecode.compile_tree(site, compiler)
        unpacked = tarball.pack(site, target)
    if smoke:
        _smoke(compiler, target, recipe.smoke)
    return {"glibc_floor": floor, "unpacked_bytes": str(unpacked)}


def _install(recipe: Recipe, site: Path, *, arch: str, minor: str) -> None:
    """Run uv in an empty folder: no project's configuration is discovered, the user's own index settings still hold."""
    command = [
        *(_uv(), "pip", "install", "--quiet", "--no-progress", "--target", str(site), "--python", sys.executable),
        *("--require-hashes", "--no-deps", "--only-binary", ":all:", "--link-mode", "copy", "--no-compile-bytecode"),
        *("--python-version", minor, "--python-platform", f"{arch}-{recipe.platform}"),
        *("--requirement", str(REQUIREMENTS / recipe.lock)),
    ]
    with tempfile.TemporaryDirectory(prefix="boxstrap-empty-") as empty:
        done = subprocess.run(
            command,
            cwd=empty,
            env={**os.environ, "UV_PYTHON_DOWNLOADS": "never"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    if done.returncode != 0:
        raise ArtifactError(
            f"uv could not install {recipe.lock} for {arch} and Python {minor}: {' '.join(done.stderr.split())[-600:]}",
            remedy="Check the network and the index that uv is configured to use.",
        )


def _uv() -> str:
    """Find the uv of our own environment, else one on PATH."""
    beside = Path(sys.executable).parent
    found = shutil.which("uv", path=str(beside)) or shutil.which("uv")
    if found is None:
        raise ArtifactError("uv was not found, and payloads are built with it.", remedy="Install it: pip install uv.")
    return found


def _trim(site: Path) -> None:
    """Drop what no import reads: scripts, installer records, stubs, extensions' sources, packaged tests, bytecode."""
    for folder, folders, files in os.walk(site, topdown=True):
        here = Path(folder)
        for name in list(folders):
            packaged_tests = name in _PACKAGED_TESTS and (here / name / "__init__.py").is_file() and here != site
            if name == "__pycache__" or packaged_tests or (here == site and name == "bin"):
                shutil.rmtree(here / name)
                folders.remove(name)
        for name in files:
            if name in _UNWANTED_NAMES or name.endswith(_UNWANTED_SUFFIXES):
                (here / name).unlink()


def _smoke(python: Path, archive: Path, modules: tuple[str, ...]) -> None:
    """Import the agent as the box will: -I, an empty environment, only the payload on sys.path."""
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix="smoke-") as folder:
        tarball.unpack(archive, Path(folder))
        done = subprocess.run(
            [str(python), "-I", "-c", _SMOKE, folder, *modules],
            cwd="/",
            env={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ArtifactError(
            f"The payload does not import {', '.join(modules)}: {said[:300]}",
            remedy="The lock and the stand-ins do not fit each other.",
        )
