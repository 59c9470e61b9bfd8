# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The manifest of a runtime: every file with its size, sha256 and mode, written last, and asked before each reuse.

It refuses to repair: it only says what is missing or changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

VERSION = 1


@dataclass
class Record:
    """What a tree holds: per relative path a file's size, sha256 and mode, or a link's target."""

    files: dict[str, tuple[int, str, int]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The sum of the files' sizes."""
        return sum(size for size, _, _ in self.files.values())


def record_tree(folder: str) -> Record:
    """Hash a tree that is on disk already; paths in the record are relative to it.

    Raises:
        ValueError: a link leads out of the folder, or something is neither file, folder nor link.
        OSError: something cannot be read.
    """
    record = Record()
    for entry in _walk(folder):
        name = entry.path[len(folder) + 1 :]
        if entry.is_symlink():
            target = os.readlink(entry.path)
            if leads_out(name, target):
                raise ValueError(f"{name} is a link to {target}, which leads out")
            record.links[name] = target
        elif entry.is_file(follow_symlinks=False):
            with open(entry.path, "rb") as source:
                digest = hashlib.file_digest(source, "sha256").hexdigest()
                about = os.fstat(source.fileno())
            record.files[name] = (about.st_size, digest, stat.S_IMODE(about.st_mode))
        else:
            raise ValueError(f"{name} is neither a file, a folder nor a link")
    return record


def leads_out(name: str, target: str) -> bool:
    """Tell whether a link at `name` leaves the tree. `..` may only lead, so that no chain of links can climb."""
    if target.startswith("/"):
        return True
    depth = name.count("/")
    parts = [part for part in target.split("/") if part not in {"", "."}]
    climbs = 0
    while climbs < len(parts) and parts[climbs] == "..":
        climbs += 1
    return climbs > depth or ".." in parts[climbs:]


def _walk(folder: str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path)
            else:
                yield entry


def write(path: str, record: Record, about: dict[str, object]) -> None:
    """Write the manifest and see it on disk.

    Only the manifest and the folders' names are synced. After a power cut another file may be short; then its size is
    not the manifest's, and the next installation repairs. Syncing every file costs a second per thousand, and syncing
    the file system waits for what everybody else on the host has written.

    Raises:
        OSError: it cannot be written.
    """
    plain = {"v": VERSION, **about, "files": dict(sorted(record.files.items())), "links": dict(sorted(record.links.items()))}
    with open(path, "x", encoding="ascii") as sink:
        json.dump(plain, sink, separators=(",", ":"))
        sink.flush()
        os.fsync(sink.fileno())


def verify(runtime: str, *, digest: str, hashes: bool) -> tuple[list[str], int, int]:
    """Compare a published runtime with its manifest: presence and size of all, contents when `hashes`.

    Returns:
        What is wrong, one sentence each and at most ten (none: it is whole); how many files; how many bytes.
    """
    try:
        with open(f"{runtime}/manifest.json", "rb") as source:
            manifest = json.load(source)
        if manifest["v"] != VERSION or manifest["digest"] != digest:
            return [f"the manifest is of version {manifest['v']} and digest {manifest['digest']}"], 0, 0
        files, links = manifest["files"], manifest["links"]
        wrong: list[str] = []
        for name, (size, sha256, _mode) in files.items():
            fault = _fault(f"{runtime}/{name}", size, sha256 if hashes else None)
            if fault:
                wrong.append(f"{name} {fault}")
        for name, target in links.items():
            path = f"{runtime}/{name}"
            if not os.path.islink(path) or os.readlink(path) != target:
                wrong.append(f"{name} is no link to {target}")
        return wrong[:10], len(files), sum(size for size, _, _ in files.values())
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"the manifest cannot be read: {error!r}"], 0, 0


def _fault(path: str, size: int, sha256: str | None) -> str:
    try:
        about = os.lstat(path)
    except OSError as error:
        return f"is not there ({error.strerror})"
    if not stat.S_ISREG(about.st_mode):
        return "is not a file"
    if about.st_size != size:
        return f"has {about.st_size} bytes instead of {size}"
    if sha256 is not None:
        with open(path, "rb") as source:
            if hashlib.file_digest(source, "sha256").hexdigest() != sha256:
                return "has other contents"
    return ""
