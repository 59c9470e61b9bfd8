# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Where a session stands, and its last word: files that the agent may have made something else of.

A receipt that is not there is never assumed: whoever needs one and finds none has to make it true first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping

from boxstrap.runner import processes
from boxstrap.runner.layout import SessionPaths
from boxstrap.runner.wire import STOPPED_CLAIM, Receipt, Survivor, session_brand, to_json

STARTING_BOUND_S = 15.0
"""How long a claim may stand without a supervisor before it counts as lost."""
RECEIPT_MAX = 1024 * 1024
RESERVE = 512 * 1024
"""Bytes of disk that are kept for the last events and the receipt."""
RUNS = b"+"
"""What a supervisor that has waited says on `tell` when it takes a request: from then on a receipt is owed."""
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""How a file of the session folder is opened: the agent may have put a link or a FIFO in its place."""


def claim_of(session: SessionPaths) -> str:
    """Return the claim: a request digest, "stopped", or "" when nobody claimed the session yet."""
    try:
        return os.readlink(session.claim)
    except OSError:
        return ""


def read_file(path: str, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes; never waits, never follows a link.

    Raises:
        OSError: it is not there, is something else, or is larger.
    """
    with open(os.open(path, READ_FLAGS), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "it is no regular file", path)
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(0, f"it has more than {limit} bytes", path)
    return data


def introduction(session: SessionPaths) -> dict[str, object]:
    """Return what supervisor.json says: pid and start, watchdog, and the processes that ran before."""
    try:
        said = json.loads(read_file(session.supervisor, 16 * RECEIPT_MAX))
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def process_key(value: object) -> tuple[int, int] | None:
    """Read a (pid, start), or None where it is none."""
    if isinstance(value, list) and len(value) == 2 and all(type(one) is int for one in value):
        return value[0], value[1]
    return None


def supervisor_alive(session: SessionPaths, said: Mapping[str, object] | None = None) -> tuple[int, int] | None:
    """Return the (pid, start) of the session's supervisor if that very process runs; `said` is its introduction, if at hand.

    It must bear the brand, where the kernel shows any: the agent may have written the number of a stranger.
    """
    said = introduction(session) if said is None else said
    found = process_key([said.get("pid"), said.get("start")])
    if found is None or not processes.alive(*found):
        return None
    return found if not said.get("branded") or processes.brand_on(found[0]) == session_brand(session.path) else None


def watchdog_alive(said: Mapping[str, object]) -> tuple[int, int] | None:
    """Return the (pid, start) of the supervisor's parent as introduced, if that runs and is a program like this one."""
    found = process_key(said.get("watchdog"))
    return found if found is not None and is_like_this(*found) else None


def is_like_this(pid: int, start: int) -> bool:
    """Whether that very process runs, and is a program like this one: the agent may have named any other."""
    with contextlib.suppress(OSError):
        return processes.alive(pid, start) and os.path.samefile(f"/proc/{pid}/exe", "/proc/self/exe")
    return False


def receipt_of(session: SessionPaths) -> Receipt | None:
    """Return the receipt, or None when there is none that can be read."""
    try:
        plain = json.loads(read_file(session.receipt, RECEIPT_MAX))
        for name in ("survivors", "unaccounted"):
            plain[name] = [Survivor(**one) for one in plain.get(name, [])]
        return Receipt(**plain)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return None


def state_of(session: SessionPaths) -> str:
    """Say absent, running, ended or lost.

    A live supervisor outranks any receipt, and so does its parent, which is about to judge it: the agent can write one.
    """
    claim = claim_of(session)
    if not claim:
        return "absent"
    if claim == STOPPED_CLAIM:
        return "ended"
    said = introduction(session)
    if supervisor_alive(session, said) or watchdog_alive(said):
        return "running"
    if os.path.lexists(session.receipt):
        return "ended" if receipt_of(session) is not None else "lost"
    if os.path.lexists(session.supervisor) and said.get("claim") != "":  # one that only waited leaves it to who claimed
        return "lost"
    with contextlib.suppress(OSError):
        if time.time() - os.lstat(session.claim).st_mtime < STARTING_BOUND_S:
            return "running"
    return "lost"


def introduce(session: SessionPaths, claim: str, *, agent: str, watchdog: processes.Process | None, branded: bool) -> None:
    """Say in supervisor.json who supervises, and what ran before; keep some disk for the last words.

    `claim` is the request that it runs, or "" for as long as it waits for one (warm.py).
    """
    with contextlib.suppress(OSError):
        fd = os.open(session.reserve, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, RESERVE)
        finally:
            os.close(fd)
    everyone = processes.every()
    me = next(process for process in everyone if process.pid == os.getpid())
    said = {
        "pid": me.pid,
        "start": me.start,
        "claim": claim,
        "agent": agent,
        "branded": branded,
        "watchdog": None if watchdog is None else watchdog.key,
        "before": [process.key for process in everyone],
    }
    replace_file(session.supervisor, to_json(said) + "\n")


def take_leave(session: SessionPaths) -> None:
    """Say in supervisor.json that the watchdog has judged: what it still does keeps the session from ending no more."""
    said = introduction(session)
    with contextlib.suppress(OSError, ValueError, RecursionError):  # then the session ends when the watchdog does
        if said:
            replace_file(session.supervisor, to_json({**said, "watchdog": None}) + "\n")


def release(session: SessionPaths) -> None:
    """Give the reserve back: the agent may have filled the disk, and it is gone now."""
    with contextlib.suppress(OSError):
        os.unlink(session.reserve)


def write_receipt(session: SessionPaths, receipt: Receipt, *, tell: int = -1) -> None:
    """Put the receipt in its place, whole or not at all, and vouch for it on `tell` (its sha256) before."""
    text = to_json(receipt) + "\n"
    if tell >= 0:
        with contextlib.suppress(OSError):  # the watchdog was killed, and nobody hears it
            os.write(tell, hashlib.sha256(text.encode()).hexdigest().encode())
    replace_file(session.receipt, text)


def replace_file(path: str, text: str) -> None:
    """Write a file by temporary name, fsync and rename."""
    part = f"{path}.part"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(part)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(part, path)
