# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Brings out the payloads that were too large for a line of evidence.

Each is named by the sha256 of what it holds, in a valid event; that name is all that the host takes from the sandbox as a
name, and what does not match it is thrown away. It refuses to list a folder of the sandbox: a million files may lie there.
"""

from __future__ import annotations

import asyncio
from inspect import signature
from pathlib import Path

from boxstrap.controller.collect import Collector
from boxstrap.controller.errors import EvidenceError
from boxstrap.controller.push import foreign
from boxstrap.controller.sandbox import Sandbox
from boxstrap.controller.tarball import sha256_of

ARTIFACT_MAX = 64 * 1024 * 1024
ARTIFACTS_TOTAL_MAX = 512 * 1024 * 1024
"""Bytes of one artifact, and of a session's together, that the host takes."""

REFUSED_PAUSES_S = (0.3, 0.7, 1.5, 3.0)
"""Between tries of what was refused. A box that is being restarted refuses in its own words; the waits are few for all
artifacts together, since a hostile box may refuse each."""


async def fetch_artifacts(sandbox: Sandbox, remote: str, folder: Path, collector: Collector) -> int:
    """Copy what the evidence names from the folder `remote` into `folder`; repeated, it goes on where it was interrupted.

    Returns:
        How many are in `folder` afterwards. What is missing, false or too much becomes a gap.

    Raises:
        SandboxLost: the sandbox does not answer; what was not decided yet is left for the next call.
    """
    left = ARTIFACTS_TOTAL_MAX - sum(_size(folder / digest) for digest, decided in collector.artifacts.items() if decided)
    pauses = iter(REFUSED_PAUSES_S)
    for digest in [digest for digest, decided in collector.artifacts.items() if not decided]:
        local = folder / digest
        try:
            while not _is_whole(local, digest):
                try:
                    await _download(sandbox, f"{remote}/{digest}", local, max_bytes=min(left, ARTIFACT_MAX))
                except OSError as error:
                    pause = None if isinstance(error, FileNotFoundError) else next(pauses, None)
                    if pause is None:
                        raise
                    await asyncio.sleep(pause)
            left -= _size(local)
        except (OSError, EvidenceError) as error:
            collector.note("artifact_missing", f"{digest}: {str(error)[:200]}")
        collector.artifacts[digest] = True
    return sum(_is_there(folder / digest) for digest in collector.artifacts)


async def _download(sandbox: Sandbox, remote: str, local: Path, *, max_bytes: int) -> None:
    part = _part_of(local)
    bounded = {"max_bytes": max_bytes} if "max_bytes" in signature(sandbox.download).parameters else {}
    try:
        await foreign(sandbox.download(remote, part, **bounded), files=True)
        if _size(part) > max_bytes or not _is_whole(part, local.name):
            raise EvidenceError("What lies there is something else than its name says, or more than is allowed.")
        part.replace(local)
    finally:
        part.unlink(missing_ok=True)


def _part_of(local: Path) -> Path:
    local.parent.mkdir(mode=0o700, exist_ok=True)
    return local.with_name(f".{local.name}.part")


def _is_whole(path: Path, digest: str) -> bool:
    return _is_there(path) and sha256_of(path) == digest


def _is_there(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _size(path: Path) -> int:
    return path.lstat().st_size if _is_there(path) else 0
