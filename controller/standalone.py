# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""python-build-standalone: the interpreter that the most boxes can run (glibc 2.17), where it can be reached.

URLs and sha256 come from pbs-installer's data; PBS_INSTALLER_BASE_URL names a mirror. It refuses bytes that do not have
the expected sha256, and the releases that ask for an executable stack.
"""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import httpx
from pbs_installer import get_download_link

from boxstrap.controller import download
from boxstrap.controller.errors import ArtifactError
from boxstrap.controller.interpreters import MINORS

BROKEN = ("20260320", "20260407")
"""First and last release whose libpython has an executable PT_GNU_STACK (python-build-standalone issues 1061 and 1072)."""
PROBE_TIMEOUT_S = 3.0
"""Seconds for the whole probe, name resolution included."""
_MICROS = 40


@dataclass(frozen=True)
class Release:
    """One archive: where it is, what it must hash to, and the Python in it ("3.13.5")."""

    url: str
    sha256: str
    version: str

    @property
    def date(self) -> str:
        """The release's name, a date: "20260602"; "" when the file's name has none."""
        found = re.search(r"\+(\d{8})-", unquote(self.url))
        return found.group(1) if found else ""

    @property
    def refused(self) -> bool:
        """Whether it is one of the releases that new systems cannot load."""
        return BROKEN[0] <= self.date <= BROKEN[1]


def newest(arch: str, *, minors: tuple[str, ...] = MINORS) -> Release | None:
    """Choose the newest release for `arch` that is not refused, or None when pbs-installer knows none."""
    mirror = os.environ.get("PBS_INSTALLER_BASE_URL") or None
    for minor in minors:
        try:
            top, _ = get_download_link(minor, arch, "linux", base_url=mirror)
        except ValueError:
            continue
        for micro in range(top.micro, -1, -1):
            try:
                _, (url, sha256) = get_download_link(f"{minor}.{micro}", arch, "linux", base_url=mirror)
            except ValueError:
                continue
            release = Release(url, sha256 or "", f"{minor}.{micro}")
            if release.sha256 and url.endswith(".tar.gz") and not release.refused:
                return release
    return None


def reachable(url: str) -> bool:
    """Ask for one byte, for at most PROBE_TIMEOUT_S; a resolver that hangs is left behind in its thread."""
    answer: list[bool] = []
    one = {"Range": "bytes=0-0"}

    def ask() -> None:
        try:
            with httpx.stream("GET", url, headers=one, timeout=PROBE_TIMEOUT_S, follow_redirects=True) as response:
                answer.append(response.status_code < 400)
        except (httpx.HTTPError, httpx.InvalidURL, OSError):
            answer.append(False)

    thread = threading.Thread(target=ask, name="standalone-probe", daemon=True)
    thread.start()
    thread.join(PROBE_TIMEOUT_S)
    return bool(answer and answer[0])


def fetch(release: Release, target: Path) -> None:
    """Download a release to `target`.

    Raises:
        ArtifactError: it is refused, the network failed (code "unreachable"), or the bytes are not the expected ones.
    """
    if release.refused:
        raise ArtifactError(
            f"python-build-standalone {release.date} asks for an executable stack.",
            remedy="Use another release.",
            code="executable-stack",
        )
    found = download.fetch(release.url, target, what="The standalone Python")
    if found != release.sha256:
        raise ArtifactError(
            f"The standalone Python has sha256 {found[:16]}…, needed {release.sha256[:16]}….",
            remedy="Look at the mirror (PBS_INSTALLER_BASE_URL) and the proxies on the way, or use --interpreter host.",
            code="upload-corrupt",
        )
