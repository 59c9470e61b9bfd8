# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A portable interpreter out of one that lies on this host, or out of an unpacked standalone build.

What comes out runs from any folder and brings every library but glibc. It is trimmed, stripped, compiled, checked, and
then proved: unpacked somewhere else, and run with an empty environment. It refuses an executable stack.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from boxstrap.controller import bytecode, elf, tarball
from boxstrap.controller.errors import ArtifactError
from boxstrap.controller.interpreters import MINORS, MODULES, WHEEL_LIBRARIES, Candidate, wanted_extension

_UNWANTED_FOLDERS = {"test", "tests", "idlelib", "turtledemo", "tkinter", "ensurepip", "lib2to3", "pydoc_data", "__phello__"}
_UNWANTED_FOLDERS |= {"site-packages", "dist-packages", "__pycache__"}
_UNWANTED_FILES = {"turtle.py", "__hello__.py", "antigravity.py", "this.py", "_aix_support.py", "_osx_support.py"}
_KEPT_SUFFIXES = (".py", ".txt", ".csh", ".fish", ".ps1")

_PROVE = """
import json, sys
for name in sys.argv[1].split(","):
    __import__(name)
import ssl, sqlite3, ctypes, hashlib
sqlite3.connect(":memory:").execute("select sqlite_version()").fetchone()
hashlib.new("sha256", b"x").hexdigest()
ssl.create_default_context()
ctypes.CDLL(None)
mapped = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if ".so" in line}
files = [module.__file__ for module in sys.modules.values() if getattr(module, "__file__", None)]
paths = [sys.prefix, sys.exec_prefix, *sys.path, *files]
print(json.dumps({"version": sys.version.split()[0], "paths": paths, "mapped": sorted(mapped)}))
"""
"""Prints every path that it read from: with a compiled-in prefix still there, a half pack would look healthy on this host."""


def pack(candidate: Candidate, target: Path) -> Mapping[str, str]:
    """Pack a candidate of this host into `target` (.tar.gz) and prove it.

    Returns:
        Facts: version, arch, glibc_floor, unpacked_bytes, origin.

    Raises:
        ArtifactError: something that it needs is missing, or the packed one does not run.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="pack-") as folder:
        tree = Path(folder, "tree")
        _copy(candidate, tree)
        for path in elf.walk(tree):
            elf.strip(path)
            _relocate(path, tree)
        return finish(tree, target, version=candidate.version, arch=candidate.arch, origin=str(candidate.executable))


def repack(archive: Path, target: Path, *, origin: str, host: str, compiler: Callable[[str], Path]) -> Mapping[str, str]:
    """Pack a ready-made interpreter archive (python-build-standalone, or one of ours), which must be relocatable as it is.

    `host` is this machine's architecture; `compiler` gives a Python of a minor that runs here, for another one's archive.

    Raises:
        ArtifactError: as `pack`, and when the archive holds no CPython of a supported minor.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="pack-") as folder:
        source, tree = Path(folder, "source"), Path(folder, "tree")
        tarball.unpack(archive, source)
        if (source / "python").is_dir():
            source /= "python"
        minor = next((minor for minor in MINORS if (source / "lib" / f"python{minor}" / "os.py").is_file()), "")
        launcher = next(
            (path for path in (source / "bin" / f"python{minor}", source / "bin" / "python3") if path.is_file()), None
        )
        if not minor or launcher is None:
            raise ArtifactError(
                f"{archive.name} holds no CPython {' or '.join(MINORS)} (bin/python3 and lib/python3.X/os.py).",
                remedy="Name an interpreter, or an archive of python-build-standalone.",
            )
        executable, standard = launcher.resolve(), source / "lib" / f"python{minor}"
        libraries = _needed_inside(source / "lib", [executable, *elf.walk(standard / "lib-dynload")])
        version, arch = _version_of(standard), elf.read(executable).arch
        _copy(Candidate(executable, version, arch, standard, "lib", libraries, ""), tree)
        foreign = None if arch == host else compiler(minor)
        return finish(tree, target, version=version, arch=arch, origin=origin, compiler=foreign)


def _version_of(standard: Path) -> str:
    """Read the full version out of _sysconfigdata, without running anything."""
    for path in sorted(standard.glob("_sysconfigdata_*.py")):
        found = re.search(r"""['"]py_version['"]\s*:\s*['"](\d+\.\d+\.\d+)""", path.read_text())
        if found:
            return found.group(1)
    return standard.name.removeprefix("python") + ".0"


def _needed_inside(library: Path, files: list[Path]) -> tuple[tuple[str, Path], ...]:
    """Follow what the files need, inside one library folder: soname -> file."""
    found = {name: (library / name).resolve() for name in WHEEL_LIBRARIES if (library / name).is_file()}
    queue = [*files, *found.values()]
    while queue:
        for name in elf.read(queue.pop()).needed:
            if name not in found and not elf.GLIBC_LIBRARIES.fullmatch(name) and (library / name).is_file():
                found[name] = (library / name).resolve()
                queue.append(found[name])
    return tuple(sorted(found.items()))


def finish(
    tree: Path, target: Path, *, version: str, arch: str, origin: str, compiler: Path | None = None
) -> Mapping[str, str]:
    """Check, compile, pack and prove a tree that is otherwise complete; another architecture's needs a `compiler`.

    Raises:
        ArtifactError: as `pack`.
    """
    elf.refuse_executable_stacks(tree)
    floor = elf.glibc_floor(elf.walk(tree))
    python = tree / "bin" / "python3"
    bytecode.compile_tree(tree, compiler or python)
    unpacked = tarball.pack(tree, target)
    if compiler is None:
        prove(target, version=version)
    return {"version": version, "arch": arch, "glibc_floor": floor, "unpacked_bytes": str(unpacked), "origin": origin}


def prove(archive: Path, *, version: str) -> None:
    """Unpack the archive somewhere else and run it with an empty environment.

    Raises:
        ArtifactError: it does not run, or is not what it should be.
    """
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix="prove-") as folder:
        tarball.unpack(archive, Path(folder))
        python = Path(folder, "bin", "python3")
        done = subprocess.run(
            [str(python), "-I", "-c", _PROVE, ",".join(MODULES)],
            cwd="/",
            env={},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        said = (done.stderr.strip().splitlines() or [done.stdout.strip()])[-1]
        if done.returncode == 0:
            answer = json.loads(done.stdout)
            mapped = [path for path in answer["mapped"] if not elf.GLIBC_LIBRARIES.fullmatch(Path(path).name)]
            inside = os.path.realpath(folder)
            outside = [path for path in (*answer["paths"], *mapped) if not Path(os.path.realpath(path)).is_relative_to(inside)]
            if answer["version"] == version and not outside:
                return
            said = f"it is {answer['version']}, and reads {', '.join(outside[:3]) or 'nothing'} from outside"
    raise ArtifactError(
        f"The packed Python {version} does not run from another folder: {said[:300]}.",
        remedy="Name another interpreter with --interpreter.",
    )


def _copy(candidate: Candidate, tree: Path) -> None:
    library = tree / candidate.platlib
    standard = library / f"python{candidate.minor}"
    (tree / "bin").mkdir(parents=True)
    library.mkdir(exist_ok=True)
    _copy_file(candidate.executable, tree / "bin" / "python3", mode=0o755)
    for folder, folders, files in os.walk(candidate.stdlib):
        folders[:] = sorted(name for name in folders if name not in _UNWANTED_FOLDERS and not name.startswith("config-"))
        here = standard / Path(folder).relative_to(candidate.stdlib)
        for name in sorted(files):
            wanted = wanted_extension(name) if name.endswith(".so") else name.endswith(_KEPT_SUFFIXES)
            if wanted and name not in _UNWANTED_FILES:
                here.mkdir(parents=True, exist_ok=True)
                _copy_file(Path(folder, name), here / name, mode=0o644)
    for name, path in candidate.libraries:
        _copy_file(path, library / name, mode=0o755)


def _copy_file(source: Path, target: Path, *, mode: int) -> None:
    shutil.copyfile(source, target)
    target.chmod(mode)


def _relocate(path: Path, tree: Path) -> None:
    """Let a file find its libraries beside itself. A file that needs none only loses the path that its build left."""
    facts = elf.read(path)
    library = next(folder for folder in (tree / "lib64", tree / "lib") if folder.is_dir())
    if any(not elf.GLIBC_LIBRARIES.fullmatch(name) for name in facts.needed):
        elf.set_rpath(path, f"$ORIGIN/{os.path.relpath(library, path.parent)}")
    elif path.parent.name == "bin":
        elf.set_rpath(path, "$ORIGIN/../" + library.name)  # a static launcher still decides where wheels find libgcc_s
    elif facts.rpath:
        elf.set_rpath(path, "")
