# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Python interpreters on this host: which there are, and what each can do.

A candidate is *run* to learn what it is: names lie (a pyenv shim called python3.13 may run nothing). It refuses to
change anything on the host.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from boxstrap.controller import elf
from boxstrap.controller.errors import ArtifactError

MINORS = ("3.13", "3.12")
"""What an agent may need: nooa says >=3.12,<3.14. The newest first."""
MODULES = ("ssl", "sqlite3", "ctypes", "lzma", "bz2", "zlib", "hashlib", "uuid")
"""What an interpreter must import to be of use in a box."""
WHEEL_LIBRARIES = ("libgcc_s.so.1", "libstdc++.so.6")
"""What wheels expect of any system, and images with nothing but glibc do not have."""
PROBE_TIMEOUT_S = 20.0

_PROBE = """
import json, os, platform, sys, sysconfig
missing = []
for name in sys.argv[1].split(","):
    try:
        __import__(name)
    except Exception:
        missing.append(name)
extra = {}
if "ctypes" not in missing:
    import ctypes
    for name in sys.argv[2].split(","):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        for line in open("/proc/self/maps") if sys.platform == "linux" else ():
            if line.rstrip().endswith("/" + name) or ("/" + name + ".") in line:
                extra[name] = line.split(None, 5)[5].strip()
                break
print(json.dumps({
    "version": platform.python_version(),
    "platform": sys.platform,
    "implementation": sys.implementation.name,
    "abi": sys.implementation.cache_tag + (getattr(sys, "abiflags", "") or ""),
    "arch": platform.machine(),
    "executable": os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable),
    "stdlib": os.path.realpath(sysconfig.get_path("stdlib")),
    "platlib": sys.platlibdir,
    "missing": missing,
    "extra": extra,
}))
"""


@dataclass(frozen=True)
class Candidate:
    """One interpreter that was run and answered.

    `stdlib` is the folder of os.py, `platlib` the name that the build gave to lib ("lib64" on some distributions),
    `libraries` the shared libraries that have to come along, by soname, `floor` the glibc that all of it together needs.
    """

    executable: Path
    version: str
    arch: str
    stdlib: Path
    platlib: str
    libraries: tuple[tuple[str, Path], ...]
    floor: str

    @property
    def minor(self) -> str:
        """The version without its last part: "3.13"."""
        return self.version.rpartition(".")[0]


def places() -> list[Path]:
    """Name every file that may be an interpreter, without running it: PATH, pyenv, uv, and the one that runs now."""
    found: list[Path] = []
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        found += [Path(folder) / f"python{minor}" for minor in MINORS] + [Path(folder) / "python3"] if folder else []
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or _data_home() / "uv" / "python")
    for minor in MINORS:
        found += sorted(pyenv.glob(f"versions/{minor}.*/bin/python{minor}"))
        found += sorted(uv.glob(f"cpython-{minor}*/bin/python{minor}"))
    found.append(Path(sys.executable))
    seen: dict[str, Path] = {}
    for path in found:
        if path.is_file() and os.access(path, os.X_OK):
            seen.setdefault(os.path.realpath(path), path)
    return list(seen.values())


def _data_home() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")


def examine(path: Path) -> Candidate | str:
    """Run one file and see what it is.

    Returns:
        The candidate, or why it is none (half a sentence).
    """
    facts = _ask(path)
    if isinstance(facts, str):
        return facts
    try:
        return _unfit(facts) or _with_libraries(facts)
    except ArtifactError as error:
        return f"cannot be packed: {error}"


def _ask(path: Path) -> dict[str, Any] | str:
    try:
        done = subprocess.run(
            [str(path), "-I", "-c", _PROBE, ",".join(MODULES), ",".join(WHEEL_LIBRARIES)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run ({error.__class__.__name__})"
    if done.returncode != 0:
        return f"exits {done.returncode}: {(done.stderr.strip().splitlines() or ['no output'])[0][:120]}"
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        return "prints something else than a Python would"


def _unfit(facts: dict[str, Any]) -> str:
    version = str(facts["version"])
    if facts["platform"] != "linux":
        return f"is built for {facts['platform']}, needed linux"
    if version.rpartition(".")[0] not in MINORS or facts["implementation"] != "cpython":
        return f"is {facts['implementation']} {version}, needed CPython {' or '.join(MINORS)}"
    if facts["abi"].endswith(("t", "d")):
        return f"is a free-threaded or debug build ({facts['abi']})"
    return f"cannot import {', '.join(facts['missing'])}" if facts["missing"] else ""


def _with_libraries(facts: dict[str, Any]) -> Candidate | str:
    executable, stdlib = Path(facts["executable"]), Path(facts["stdlib"])
    modules = [path for path in sorted((stdlib / "lib-dynload").glob("*.so")) if wanted_extension(path.name)]
    if "musl" in elf.read(executable).loader:
        return "is built for musl, needed glibc"
    own = _closure([executable, *modules])
    lost = [name for name, path in own.items() if path is None]
    if lost:
        return f"needs {', '.join(lost)}, which this host does not have"
    libraries = {name: path for name, path in own.items() if path and not elf.GLIBC_LIBRARIES.fullmatch(name)}
    floor = elf.glibc_floor([executable, *modules, *libraries.values()])
    for name, path in dict(facts["extra"]).items():
        # A wheel may want these of the box. One that needs a newer glibc than Python itself would only hide the box's own.
        if elf.version_key(elf.read(Path(path)).floor) <= elf.version_key(floor):
            libraries[name] = Path(path)
    return Candidate(
        executable=executable,
        version=str(facts["version"]),
        arch=str(facts["arch"]),
        stdlib=stdlib,
        platlib=str(facts["platlib"]),
        libraries=tuple(sorted(libraries.items())),
        floor=floor,
    )


_UNWANTED_EXTENSIONS = re.compile(r"_test|_tkinter|_xxtestfuzz|xxlimited|xxsubtype|_ctypes_test|_crypt\.|nis\.")


def wanted_extension(name: str) -> bool:
    """Tell whether an extension is worth its bytes: no tests, no tkinter, no nis and crypt (gone in 3.13; a newer floor)."""
    return not _UNWANTED_EXTENSIONS.match(name)


def _closure(files: list[Path]) -> dict[str, Path | None]:
    """Ask the loader where each needed library is, transitively: soname -> path, or None when it is not found."""
    found: dict[str, Path | None] = {}
    environment = {"PATH": os.defpath, "LC_ALL": "C"}
    done = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=False, env=environment)
    for line in done.stdout.splitlines():
        name, arrow, rest = line.strip().partition(" => ")
        if arrow:
            found[name] = Path(rest.rpartition(" (")[0]) if rest.startswith("/") else None
    return found


def survey() -> Iterator[tuple[Path, Candidate | str]]:
    """Examine every place; pairs of the file and what it turned out to be."""
    for path in places():
        yield path, examine(path)


def best(candidates: list[Candidate]) -> Candidate:
    """Choose the one that the most boxes can run (the lowest glibc floor), then the newest."""
    return min(candidates, key=lambda one: (elf.version_key(one.floor), tuple(-part for part in elf.version_key(one.version))))


def to_json(candidate: Candidate) -> dict[str, object]:
    """Turn a candidate into plain data, so that a survey need not be made twice."""
    plain = asdict(candidate)
    return {
        **plain,
        **{name: str(plain[name]) for name in ("executable", "stdlib")},
        "libraries": [(n, str(p)) for n, p in candidate.libraries],
    }


def from_json(plain: dict[str, Any]) -> Candidate:
    """Read what `to_json` made."""
    return Candidate(
        executable=Path(plain["executable"]),
        version=plain["version"],
        arch=plain["arch"],
        stdlib=Path(plain["stdlib"]),
        platlib=plain["platlib"],
        libraries=tuple((name, Path(path)) for name, path in plain["libraries"]),
        floor=plain["floor"],
    )
