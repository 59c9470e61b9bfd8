# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Removes what is ours: published runtimes, stages, locks, and the folders of sessions that have ended.

It refuses while a session or an installation is running, and it touches nothing that it does not know by name and contents.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator

from boxstrap.runner.layout import DIGEST_CHARS, LOCK, STAGE, SessionPaths
from boxstrap.runner.wire import SESSION_ID, Code, Failure

_DIGEST = rf"[0-9a-f]{{{DIGEST_CHARS}}}"
_RUNTIME, _STAGE, _LOCK = (
    re.compile(text) for text in (_DIGEST, rf"{re.escape(STAGE)}{_DIGEST}-\d+", re.escape(LOCK) + _DIGEST)
)
_SESSION = re.compile(SESSION_ID)
_AGAIN = "Stop it, or wait for its end, and try again."


def clean(runtime_root: str, session_root: str) -> list[str] | Failure:
    """Remove it all and return the paths, or say who is still at work; then nothing was removed."""
    sessions = [SessionPaths.of(session_root, name) for name in _folders(session_root) if _SESSION.fullmatch(name)]
    for session in sessions:
        pid = _keeper(session)
        if pid is not None:
            return Failure(
                code=Code.SESSION_CONFLICT,
                message=f"found session {session.path} running under pid {pid}, needed none to run.",
                remedy=_AGAIN,
            )
    ended = [session.path for session in sessions if os.path.isfile(session.receipt)]
    with contextlib.ExitStack() as held:
        locks = [f"{runtime_root}/{name}" for name in _names(runtime_root) if _LOCK.fullmatch(name)]
        for path in locks:
            lock = held.enter_context(open(path, "rb"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return Failure(
                    code=Code.LOCK_TIMEOUT, message=f"found {path} held by an installation, needed it free.", remedy=_AGAIN
                )
        trees = [f"{runtime_root}/{name}" for name in _folders(runtime_root) if _is_ours(runtime_root, name)]
        for path in ended + trees:
            shutil.rmtree(path)
        # Last, and while they are held: who waits for one finds that its name is gone, and starts over.
        for path in locks:
            os.unlink(path)
    for root in (runtime_root, session_root):
        with contextlib.suppress(OSError):
            os.rmdir(root)
    return ended + trees + locks


def _is_ours(root: str, name: str) -> bool:
    if _STAGE.fullmatch(name):
        return True
    known = ("manifest.json", "boxstrap.pyz", "app/boxstrap")
    return bool(_RUNTIME.fullmatch(name)) and any(os.path.exists(f"{root}/{name}/{member}") for member in known)


def _names(root: str) -> list[str]:
    try:
        return sorted(os.listdir(root))
    except FileNotFoundError:
        return []


def _folders(root: str) -> Iterator[str]:
    for name in _names(root):
        if os.path.isdir(f"{root}/{name}") and not os.path.islink(f"{root}/{name}"):
            yield name


def _keeper(session: SessionPaths) -> int | None:
    """Give the pid of the session's supervisor, or of its parent that judges it, if that very process runs."""
    try:
        with open(session.supervisor, encoding="utf-8") as source:
            said = json.load(source)
        keepers = [(said["pid"], said["start"]), said.get("watchdog") or (0, 0)]
        return next((pid for pid, start in keepers if _start_of(pid) == start), None)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _start_of(pid: int) -> int | None:
    """Give a process's start in clock ticks since boot; none for a zombie, or when it is gone."""
    try:
        with open(f"/proc/{int(pid)}/stat", "rb") as source:
            fields = source.read().rpartition(b")")[2].split()
        return None if fields[0] in b"ZX" else int(fields[19])
    except (OSError, IndexError):
        return None
