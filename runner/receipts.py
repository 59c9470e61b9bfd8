# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Where a session stands, and its last word. Finishes the work of a supervisor that died.

A receipt that is not there is never assumed: whoever needs one and finds none has to make it true first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from boxstrap.runner import processes
from boxstrap.runner.environment import MARKER
from boxstrap.runner.layout import SessionPaths
from boxstrap.runner.wire import Receipt, Survivor, session_brand, to_json

STOPPED_CLAIM = "stopped"
STARTING_BOUND_S = 15.0
"""How long a claim may stand without a supervisor before it counts as lost."""
SCAN_EVERY_S = 0.02
KILL_BOUND_S = 5.0
"""How long survivors of SIGKILL are hunted before the receipt says that cleanup is not confirmed."""
LOCK_BOUND_S = 15.0
"""How long another finisher is waited for. The agent can take the lock as well: then the work is done without it."""
RECEIPT_MAX = 1024 * 1024
RESERVE = 512 * 1024
"""Bytes of disk that are kept for the last events and the receipt."""
NAMED_MAX = 256
"""Survivors that a receipt names one by one; `detail` has their number when there are more."""
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


def _said(session: SessionPaths) -> dict[str, object]:
    """Return what supervisor.json says: pid and start, watchdog, and the processes that ran before."""
    try:
        said = json.loads(read_file(session.supervisor, 16 * RECEIPT_MAX))
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _pair(value: object) -> tuple[int, int] | None:
    if isinstance(value, list) and len(value) == 2 and all(type(one) is int for one in value):
        return value[0], value[1]
    return None


def supervisor_alive(session: SessionPaths) -> tuple[int, int] | None:
    """Return the (pid, start) of the session's supervisor if that very process runs.

    It must bear the brand, where the kernel shows any: the agent may have written the number of a stranger.
    """
    said = _said(session)
    found = _pair([said.get("pid"), said.get("start")])
    if found is None or not processes.alive(*found):
        return None
    return found if not said.get("branded") or processes.brand_on(found[0]) == session_brand(session.path) else None


def watchdog_alive(session: SessionPaths) -> tuple[int, int] | None:
    """Return the (pid, start) of the supervisor's parent, if that runs and is a program like this one."""
    found = _pair(_said(session).get("watchdog"))
    if found is None or not processes.alive(*found):
        return None
    with contextlib.suppress(OSError):
        if os.path.samefile(f"/proc/{found[0]}/exe", "/proc/self/exe"):
            return found
    return None


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
    if supervisor_alive(session) or watchdog_alive(session):
        return "running"
    if os.path.lexists(session.receipt):
        return "ended" if receipt_of(session) is not None else "lost"
    if os.path.lexists(session.supervisor):
        return "lost"
    with contextlib.suppress(OSError):
        if time.time() - os.lstat(session.claim).st_mtime < STARTING_BOUND_S:
            return "running"
    return "lost"


def introduce(session: SessionPaths, *, agent: str, watchdog: processes.Process | None, branded: bool) -> None:
    """Say in supervisor.json who supervises, and what ran before; keep some disk for the last words."""
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
        "agent": agent,
        "branded": branded,
        "watchdog": None if watchdog is None else watchdog.key,
        "before": [process.key for process in everyone],
    }
    replace_file(session.supervisor, to_json(said) + "\n")


def release(session: SessionPaths) -> None:
    """Give the reserve back: the agent may have filled the disk, and it is gone now."""
    with contextlib.suppress(OSError):
        os.unlink(session.reserve)


def write_receipt(session: SessionPaths, receipt: Receipt, *, tell: int = -1) -> None:
    """Put the receipt in its place, whole or not at all, and vouch for it on `tell` (its sha256) before."""
    text = to_json(receipt) + "\n"
    if tell >= 0:
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


@contextlib.contextmanager
def locked(session: SessionPaths) -> Iterator[None]:
    """Hold the session's lock if it can be had: two finishers do no harm to each other, they only do the work twice."""
    fd = -1
    with contextlib.suppress(OSError):
        fd = os.open(session.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        bound = time.monotonic() + LOCK_BOUND_S
        while time.monotonic() < bound:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(SCAN_EVERY_S)
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def kill_all(find: Callable[[], list[processes.Process]], *, bound_s: float = KILL_BOUND_S) -> list[processes.Process]:
    """KILL what `find` finds until two scans in a row find none; return what is left when the bound is over."""
    deadline = time.monotonic() + bound_s
    clean = 0
    while True:
        found = find()
        clean = 0 if found else clean + 1
        if clean == 2:
            return []
        if time.monotonic() >= deadline:
            return found
        if found:
            processes.kill(find)
        time.sleep(SCAN_EVERY_S)


def named(found: list[processes.Process]) -> list[Survivor]:
    """Name processes in a receipt."""
    return [Survivor(pid=process.pid, name=process.name) for process in found[:NAMED_MAX]]


def finish(session: SessionPaths, *, adopted: bool) -> Receipt:
    """Make a receipt true: reap what is left of a session whose supervisor is gone, and say so.

    What the folder says is the agent's to write. So the session is known by its path and its claim, and a receipt that
    lies there counts only if it is this session's and nothing of the session runs.

    Args:
        session: the session folder.
        adopted: whether this process is the subreaper that inherited the orphans, and knows that no receipt is genuine.
    """
    reaped = 0

    def find() -> list[processes.Process]:
        nonlocal reaped
        reaped += _reap_all() if adopted else 0
        return left_of(session, below=(os.getpid(),) if adopted else ())

    with locked(session):
        written = None if adopted else receipt_of(session)
        if written is not None and not _is_of(written, session):
            written = None
        found = find()
        if written is not None and written.cleanup_confirmed:
            if not found:
                return written
            written = None
        left = kill_all(find)
        strangers = [] if adopted or (written is not None and not written.supervisor_lost) else _unaccounted(session)
        confirmed = not left and strangers == []
        if written is not None:
            receipt = replace(written, survivors=named(left), unaccounted=named(strangers or []), cleanup_confirmed=confirmed)
        else:
            receipt = _lost(session, left, strangers, reaped)
        release(session)
        with contextlib.suppress(OSError):  # a full disk: whoever asked gets it all the same
            write_receipt(session, receipt)
        return receipt


def left_of(session: SessionPaths, *, below: tuple[int, ...] = ()) -> list[processes.Process]:
    """List the session's processes that are not dead: by its signs, and below `below`.

    What is dead may stay in the list for as long as the box runs: where PID 1 does not wait, an orphan is never reaped.
    """
    marker = f"{MARKER}={os.path.basename(session.path)}".encode()
    found = processes.belonging(session.path, marker, processes.every(), below=below)
    return [process for process in found if not process.dead]


def _is_of(receipt: Receipt, session: SessionPaths) -> bool:
    return receipt.session_id == os.path.basename(session.path) and receipt.request_digest == claim_of(session)


def _reap_all() -> int:
    reaped = 0
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            reaped += 1
    return reaped


def _unaccounted(session: SessionPaths) -> list[processes.Process] | None:
    """List what may be the session's and bears no sign; None when nothing tells what ran before it."""
    before = _said(session).get("before")
    if not isinstance(before, list):
        return None if os.path.lexists(session.evidence) else []
    return processes.unaccounted({pair for one in before if (pair := _pair(one))}, processes.every())


def _lost(
    session: SessionPaths, left: list[processes.Process], strangers: list[processes.Process] | None, reaped: int
) -> Receipt:
    detail = "the supervisor was killed; its work was finished by another process"
    if strangers is None:
        detail += "; supervisor.json is gone as well, so nothing tells which processes ran before"
    elif strangers:
        detail += f"; {len(strangers)} processes started meanwhile and bear no sign of whose they are"
    if len(left) > NAMED_MAX:
        detail += f"; {len(left)} processes would not go"
    size, sha = 0, hashlib.sha256()
    with contextlib.suppress(OSError), open(os.open(session.evidence, READ_FLAGS), "rb") as file:
        while evidence := file.read(1024 * 1024):
            size += len(evidence)
            sha.update(evidence)
    return Receipt(
        session_id=os.path.basename(session.path),
        request_digest=claim_of(session),
        agent=str(_said(session).get("agent", ""))[:64],
        started_at=None,
        ended_at=time.time(),
        exit_code=None,
        signal=None,
        status="",
        detail=detail,
        timed_out=False,
        stopped=False,
        oom_killed=False,
        supervisor_lost=True,
        cleanup_confirmed=not left and strangers == [],
        survivors=named(left),
        unaccounted=named(strangers or []),
        reaped=reaped,
        evidence_bytes=size,
        evidence_sha256=sha.hexdigest(),
        stdout_bytes=_size(session.agent_out),
        stderr_bytes=_size(session.agent_err),
        output_truncated=False,
        peak_rss_bytes=0,
        cpu_seconds=0.0,
    )


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0
