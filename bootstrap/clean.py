# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Removes what is ours: published runtimes, stages, locks, leftovers of a push, and the folders of sessions that have ended.

A session without a receipt is asked for its state by the runner, which reaps for a supervisor that is dead. It refuses while a
session or an installation is running, and it touches nothing that it does not know by name and contents.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

from boxstrap.runner.layout import DIGEST_CHARS, LOCK, STAGE, SessionPaths
from boxstrap.runner.wire import SESSION_ID, Code, Failure

_DIGEST = rf"[0-9a-f]{{{DIGEST_CHARS}}}"
_RUNTIME, _STAGE, _LOCK = (
    re.compile(text) for text in (_DIGEST, rf"{re.escape(STAGE)}{_DIGEST}-\d+", re.escape(LOCK) + _DIGEST)
)
_SESSION = re.compile(SESSION_ID)
_PUSH = re.compile(r"\.push-[0-9a-f]{16}")
ABANDONED_S = 900.0
"""After this long without a change, what a controller has begun and not used is its no more."""
FINISH_WITHIN_S = 60.0
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
    ended = []
    for session in sessions:
        state = "ended" if os.path.isfile(session.receipt) else _state(session)
        if state == "running":
            return Failure(
                code=Code.SESSION_CONFLICT,
                message=f"found session {session.path} at work or about to start, needed none to be.",
                remedy=_AGAIN,
            )
        ended += [session.path] if state else []
    ended += [f"{session_root}/{name}" for name in _folders(session_root) if _is_old_push(session_root, name)]
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


def _state(session: SessionPaths) -> str:
    """Have the runner finish a session whose supervisor is gone; `ended`, `running`, or nothing when it is none of ours."""
    if not os.path.isfile(session.request) and not os.path.isfile(session.prewarm):
        return ""
    if not os.path.lexists(session.claim):
        # Nobody started it. Its controller may be about to, unless it has had its time.
        return "ended" if time.time() - os.lstat(session.path).st_mtime > ABANDONED_S else "running"
    start = "import sys; sys.path.insert(0, sys.argv.pop(1)); from boxstrap.runner.__main__ import main; sys.exit(main())"
    verb = "stop" if _is_stopped(session) else "status"
    argv = [sys.executable, "-I", "-X", "utf8", "-c", start, sys.path[0], verb, "--session", session.path, "--json"]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=FINISH_WITHIN_S, check=False)
    try:
        said = json.loads(done.stdout)["data"]
        return "ended" if said["state"] in {"ended", "stopped"} and not said.get("processes") else "running"
    except (ValueError, KeyError, TypeError):
        return "running"  # what cannot be asked is not removed


def _is_stopped(session: SessionPaths) -> bool:
    return os.path.islink(session.claim) and os.readlink(session.claim) == "stopped"


def _is_old_push(root: str, name: str) -> bool:
    return bool(_PUSH.fullmatch(name)) and time.time() - os.lstat(f"{root}/{name}").st_mtime > ABANDONED_S


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
