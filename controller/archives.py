# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The archive that is pushed: `prelude.sh`, then a zip built by shiv with our sandbox-side code in site-packages/boxstrap.

shiv takes file modes and the order of its own bootstrap from the file system, so its zip is written again with sorted
members and fixed modes: two builds of one commit are byte-identical on any host. Beside our code lie two pure-Python
packages for the model gateway (VENDORED). It refuses to pack anything but .py files, certificates and licences.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from importlib.metadata import version as installed_version
from pathlib import Path

from boxstrap.controller.cache import code_of
from boxstrap.controller.errors import ArtifactError
from boxstrap.controller.tarball import sha256_of

ENTRY_POINT = "boxstrap.bootstrap.__main__:main"
_EPOCH = "315532800"
"""1980-01-01, the oldest time that a zip can hold."""
VENDORED = ("h11", "certifi")
"""HTTP for the gateway, and the authorities that it trusts: a minimal image has no bundle of its own."""


def package_root() -> Path:
    """Name the folder that holds bootstrap/ and runner/: the installed package, or the checkout's links to them."""
    import boxstrap  # noqa: PLC0415  # its place is asked at run time: a test may have put another one first

    return Path(boxstrap.__file__).parent


def sources(package: Path) -> dict[str, Path]:
    """List what goes in: name inside boxstrap/ -> file.

    Raises:
        ArtifactError: the prelude or the sandbox-side code is not there.
    """
    found = {"__init__.py": package / "__init__.py"}
    for part in ("bootstrap", "runner"):
        for path in sorted((package / part).rglob("*.py")):
            found[f"{part}/{path.relative_to(package / part).as_posix()}"] = path
    prelude = package / "bootstrap" / "prelude.sh"
    if not prelude.is_file() or "runner/wire.py" not in found:
        raise ArtifactError(f"{package} does not hold bootstrap/prelude.sh and runner/.", remedy="Install boxstrap again.")
    return found


def vendored() -> dict[str, Path]:
    """List the files of the packages that travel along: name in site-packages -> file.

    Raises:
        ArtifactError: one of them is not installed here.
    """
    found: dict[str, Path] = {}
    for package in VENDORED:
        try:
            files = distribution(package).files or []
        except PackageNotFoundError:
            raise ArtifactError(
                f"{package} was not found, it goes into the archive.", remedy=f"pip install {package}."
            ) from None
        for file in files:
            if file.parts[0] == package and file.suffix in {".py", ".pem"} and "tests" not in file.parts:
                found[file.as_posix()] = Path(str(file.locate()))
            elif file.name.upper().startswith("LICENSE"):
                found[f"{package}/LICENSE"] = Path(str(file.locate()))
    return found


def inputs_of(package: Path) -> dict[str, object]:
    """Return what a cache key must hold: the content of every source."""
    files = {name: sha256_of(path) for name, path in {**sources(package), **vendored()}.items()}
    try:
        shiv = installed_version("shiv")
    except PackageNotFoundError:
        raise ArtifactError(
            "shiv was not found, and the archive is built with it.", remedy="Install it: pip install shiv."
        ) from None
    return {
        "recipe": code_of(__name__),
        "shiv": shiv,
        "prelude": sha256_of(package / "bootstrap" / "prelude.sh"),
        "files": files,
    }


def build(package: Path, target: Path) -> Mapping[str, str]:
    """Write the archive to `target`.

    Raises:
        ArtifactError: shiv is missing or failed.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="archive-") as folder:
        site, zipped = Path(folder, "site"), Path(folder, "app.pyz")
        ours = {f"boxstrap/{name}": path for name, path in sources(package).items()}
        for name, path in {**ours, **vendored()}.items():
            copy = site / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "shiv",
                "--site-packages",
                str(site),
                "--reproducible",
                "-e",
                ENTRY_POINT,
                "-o",
                str(zipped),
            ],
            env={"PATH": os.defpath, "SOURCE_DATE_EPOCH": _EPOCH},  # shiv reads ten SHIV_* variables
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ArtifactError(
                f"shiv could not build the archive: {done.stderr.strip()[-300:]}", remedy="Install it: pip install shiv."
            )
        target.write_bytes((package / "bootstrap" / "prelude.sh").read_bytes())
        _append(zipped, target)
        target.chmod(0o755)
    return {}


def publish(built: Path, digest: str) -> None:
    """Keep a checkout's dist/boxstrap.pyz the same as what was built; an installed package has no dist/."""
    checkout = Path(__file__).resolve().parent.parent
    target = checkout / "dist" / "boxstrap.pyz"
    if not (checkout / "pyproject.toml").is_file() or (target.is_file() and sha256_of(target) == digest):
        return
    target.parent.mkdir(exist_ok=True)
    copy = target.with_name(f".boxstrap-{os.getpid()}.pyz")
    shutil.copyfile(built, copy)
    copy.chmod(0o755)
    copy.replace(target)


def _append(zipped: Path, target: Path) -> None:
    """Append shiv's zip to the prelude: sorted, one time, one mode, offsets from the file's first byte."""
    with zipfile.ZipFile(zipped) as source, zipfile.ZipFile(target, "a", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        for name in sorted(source.namelist()):
            member = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            member.external_attr = 0o100644 << 16
            member.create_system = 3
            member.compress_type = zipfile.ZIP_DEFLATED
            out.writestr(member, source.read(name))
