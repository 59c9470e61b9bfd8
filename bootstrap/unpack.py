# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Unpacks a payload, hashing while it copies; the record of what was written is the return value.

It refuses every member that could leave the tree: absolute names, `..`, links that lead out, names that pass through a
link, devices and pipes. Owners, times and odd mode bits of the archive are not taken over.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tarfile

from boxstrap.bootstrap.manifest import Record, leads_out
from boxstrap.bootstrap.steps import step
from boxstrap.runner.wire import Code, Failure

_CHUNK = 1024 * 1024


def unpack(archive: str, into: str) -> Record | Failure:
    """Unpack a .tar.gz into an existing empty folder; paths in the record are relative to it.

    Raises:
        OSError: the file system says no, for example because it is full.
    """
    record = Record()
    folders = {""}
    with (
        open(archive, "rb") as packed,
        subprocess.Popen(["gzip", "-dc"], stdin=packed, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as gzip,
    ):
        try:
            # gzip on one core, this loop on the other.
            with tarfile.open(fileobj=gzip.stdout, mode="r|", bufsize=256 * 1024) as members:
                for member in members:
                    reason = _unsafe(member, record, folders)
                    if reason:
                        return Failure(
                            code=Code.UNSAFE_MEMBER,
                            message=f"found {member.name!r} in {archive}, {reason}, needed are members that stay inside.",
                            remedy="Build the payload again; do not use this one.",
                        )
                    _write(members, member, into, record, folders)
        except (tarfile.TarError, EOFError) as error:
            return Failure(
                code=Code.UPLOAD_CORRUPT,
                message=f"found that {archive} does not unpack ({error}), needed is a .tar.gz.",
                remedy="Push the file again.",
            )
        finally:
            gzip.kill()
    return record


def _unsafe(member: tarfile.TarInfo, record: Record, folders: set[str]) -> str:
    name = _name(member.name)
    parts = name.split("/")
    if member.name.startswith("/"):
        return "an absolute name"
    if ".." in parts:
        return "a name with '..'"
    if not name and not member.isdir():
        return "no name"
    above = ("/".join(parts[:end]) for end in range(1, len(parts)))
    if any(parent in record.links or parent in record.files for parent in above):
        return "a name that passes through a link or a file"
    if name in record.links or name in record.files or (name in folders and not member.isdir()):
        return "a name that was there before"
    return _unsafe_kind(member, name, record)


def _unsafe_kind(member: tarfile.TarInfo, name: str, record: Record) -> str:
    if member.issym():
        return "a link that leads out" if leads_out(name, member.linkname) else ""
    if member.islnk():
        return "" if _name(member.linkname) in record.files else "a hard link to what is not in the tree"
    return "" if member.isreg() or member.isdir() else "neither a file, a folder nor a link"


def _name(name: str) -> str:
    return "/".join(part for part in name.split("/") if part not in {"", "."})


def _write(members: tarfile.TarFile, member: tarfile.TarInfo, into: str, record: Record, folders: set[str]) -> None:
    name = _name(member.name)
    path = f"{into}/{name}"
    parent = name if member.isdir() else name.rpartition("/")[0]
    if parent not in folders:
        os.makedirs(f"{into}/{parent}", mode=0o755, exist_ok=True)
        folders.update(parent[:end] for end, letter in enumerate(parent) if letter == "/")
        folders.add(parent)
    if member.issym():
        os.symlink(member.linkname, path)
        record.links[name] = member.linkname
    elif member.islnk():
        origin = _name(member.linkname)
        os.link(f"{into}/{origin}", path)
        record.files[name] = record.files[origin]
    elif member.isreg():
        source = members.extractfile(member)
        assert source is not None, "a regular file has contents"  # noqa: S101 - for mypy
        mode = 0o755 if member.mode & 0o111 else 0o644
        hashed = hashlib.sha256()
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb", buffering=0) as sink:
            while chunk := source.read(_CHUNK):
                hashed.update(chunk)
                written = 0
                while written < len(chunk):
                    written += sink.write(chunk[written:] if written else chunk)
        record.files[name] = (member.size, hashed.hexdigest(), mode)
        if len(record.files) == 1:
            step("first-member")
