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
import signal
import time
from collections.abc import Callable, Iterator

from boxstrap.runner import processes
from boxstrap.runner.environment import MARKER
from boxstrap.runner.layout import SessionPaths
from boxstrap.runner.wire import Receipt, Request, Survivor, to_json

STOPPED_CLAIM = "stopped"
STARTING_BOUND_S = 15.0
"""How long a claim may stand without a supervisor before it counts as lost."""
SCAN_EVERY_S = 0.02
KILL_BOUND_S = 10.0
"""How long survivors of SIGKILL are hunted before the receipt says that cleanup is not confirmed."""


def claim_of(session: SessionPaths) -> str:
    """Return the claim: a request digest, "stopped", or "" when nobody claimed the session yet."""
    try:
        return os.readlink(session.claim)
    except OSError:
        return ""


def supervisor_alive(session: SessionPaths) -> tuple[int, int] | None:
    """Return the (pid, start) of the session's supervisor if that very process runs."""
    try:
        with open(session.supervisor, encoding="utf-8") as file:
            said = json.load(file)
        pid, start = int(said["pid"]), int(said["start"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (pid, start) if processes.alive(pid, start) else None


def receipt_of(session: SessionPaths) -> Receipt | None:
    """Return the receipt, or None when there is none that can be read."""
    try:
        with open(session.receipt, "rb") as file:
            plain = json.loads(file.read(1024 * 1024))
        survivors = [Survivor(**survivor) for survivor in plain.pop("survivors")]
        return Receipt(**plain, survivors=survivors)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def state_of(session: SessionPaths) -> str:
    """Say absent, running, ended or lost. A live supervisor outranks any receipt: the agent could have written that."""
    if not claim_of(session):
        return "absent"
    if supervisor_alive(session):
        return "running"
    if os.path.lexists(session.receipt):
        return "ended"
    if os.path.lexists(session.supervisor):
        return "lost"
    with contextlib.suppress(OSError):
        if time.time() - os.lstat(session.claim).st_mtime < STARTING_BOUND_S:
            return "running"
    return "lost"


def write_receipt(session: SessionPaths, receipt: Receipt) -> None:
    """Put the receipt in its place, whole or not at all."""
    replace(session.receipt, to_json(receipt) + "\n")


def replace(path: str, text: str) -> None:
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
    """Hold the session's lock: only one may finish for a dead supervisor."""
    fd = os.open(session.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def kill_all(find: Callable[[], list[processes.Process]], *, bound_s: float = KILL_BOUND_S) -> list[Survivor]:
    """KILL what `find` finds until two scans in a row find none; return what is left when the bound is over."""
    deadline = time.monotonic() + bound_s
    clean = 0
    while True:
        found = find()
        clean = 0 if found else clean + 1
        if clean == 2:
            return []
        if time.monotonic() >= deadline:
            return [Survivor(pid=process.pid, name=process.name) for process in found]
        for process in found:
            processes.send(process, signal.SIGKILL)
        time.sleep(SCAN_EVERY_S)


def finish_lost(session: SessionPaths, request: Request, digest: str, *, adopted: bool) -> Receipt:
    """Do a dead supervisor's work: reap by marker (and by parentage, when its orphans became ours), write the receipt.

    Args:
        session: the session folder.
        request: its request.
        digest: the request's digest, as claimed.
        adopted: whether this process is the subreaper that inherited the orphans.
    """
    marker = f"{MARKER}={request.session_id}".encode()
    me = os.getpid()
    reaped = 0

    def find() -> list[processes.Process]:
        nonlocal reaped
        while adopted:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break
            reaped += 1
        everyone = processes.every()
        found = set(processes.marked(marker, everyone))
        for process in list(found):
            found.update(processes.descendants(process.pid, everyone))
        if adopted:
            found.update(processes.descendants(me, everyone))
        return [process for process in found if process.pid != me and process.state not in "ZX"]

    with locked(session):
        written = receipt_of(session)
        if written is not None and supervisor_alive(session) is None and not find():
            return written
        survivors = kill_all(find)
        evidence = b""
        size, sha = 0, hashlib.sha256()
        with contextlib.suppress(OSError), open(session.evidence, "rb") as file:
            while evidence := file.read(1024 * 1024):
                size += len(evidence)
                sha.update(evidence)
        receipt = Receipt(
            session_id=request.session_id,
            request_digest=digest,
            agent=request.agent,
            started_at=None,
            ended_at=time.time(),
            exit_code=None,
            signal=None,
            status="",
            detail="the supervisor was killed; its work was finished by another process",
            timed_out=False,
            stopped=False,
            oom_killed=False,
            supervisor_lost=True,
            cleanup_confirmed=not survivors,
            survivors=survivors,
            reaped=reaped,
            evidence_bytes=size,
            evidence_sha256=sha.hexdigest(),
            stdout_bytes=_size(session.agent_out),
            stderr_bytes=_size(session.agent_err),
            output_truncated=False,
            peak_rss_bytes=0,
            cpu_seconds=0.0,
        )
        write_receipt(session, receipt)
        return receipt


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0
