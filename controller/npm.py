# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""One package of one version from the npm registry, held to its integrity hash.

npm fetches it where there is one: it knows the user's registry, proxies and credentials. Else the registry that npm would have
read is asked. It refuses to run a package's scripts and to resolve anything.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
from configparser import ConfigParser
from configparser import Error as ConfigError
from pathlib import Path

from boxstrap.controller import download
from boxstrap.controller.errors import ArtifactError

TIMEOUT_S = 900.0


def fetch(package: str, version: str, integrity: str, *, into: Path) -> Path:
    """Fetch a package's tarball into an empty folder and return its path. `integrity` is the registry's, "sha512-…".

    Raises:
        ArtifactError: it could not be fetched, or is not what the integrity says.
    """
    name = f"{package}@{version}"
    tool = shutil.which("npm")
    if tool:
        _pack(tool, name, into)
        packed = next(into.glob("*.tgz"))
    else:
        packed = into / "package.tgz"
        plain = package.rpartition("/")[2]
        download.fetch(f"{_registry()}/{package}/-/{plain}-{version}.tgz", packed, what=name)
    algorithm, _, needed = integrity.partition("-")
    with packed.open("rb") as stream:
        found = base64.b64encode(hashlib.file_digest(stream, algorithm).digest()).decode()
    if found != needed:
        raise download.corrupt(name, found, needed)
    return packed


def _pack(tool: str, name: str, into: Path) -> None:
    """Let npm fetch it, from an empty folder: no project's .npmrc is discovered, the user's own holds."""
    try:
        done = subprocess.run(
            [tool, "pack", name, "--ignore-scripts", "--silent"],
            cwd=into,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        said = "" if done.returncode == 0 else " ".join((done.stderr or done.stdout).split())[-300:] or "it said nothing"
    except subprocess.TimeoutExpired:
        said = f"no end within {TIMEOUT_S:.0f} s"
    if said:
        raise ArtifactError(
            f"npm could not fetch {name}: {said}",
            remedy="Check the network and the registry that npm is configured to use, or give the program with --program FILE.",
            code="unreachable",
        )


def _registry() -> str:
    configured = os.environ.get("NPM_CONFIG_REGISTRY") or _from_npmrc()
    if not configured:
        raise ArtifactError(
            "No npm registry is known: npm was not found, and neither NPM_CONFIG_REGISTRY nor ~/.npmrc names one.",
            remedy="Install npm, set NPM_CONFIG_REGISTRY, or give the program itself with --program FILE.",
        )
    return configured.rstrip("/")


def _from_npmrc() -> str:
    parser = ConfigParser(interpolation=None)
    try:
        parser.read_string("[npm]\n" + (Path.home() / ".npmrc").read_text(encoding="utf-8"))
    except (OSError, ConfigError, UnicodeDecodeError):
        return ""
    return parser.get("npm", "registry", fallback="")
