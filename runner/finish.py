# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Finishes the work of a supervisor that died: reaps what is left of its session, and says so in the receipt.

It refuses to kill what bears no sign of the session: that is named, and then nothing is confirmed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from boxstrap.runner import processes
from boxstrap.runner.environment import MARKER
from boxstrap.runner.layout import SessionPaths
from boxstrap.runner.receipts import READ_FLAGS, claim_of, introduction, process_key, receipt_of, release, write_receipt
from boxstrap.runner.wire import Receipt, Survivor

SCAN_EVERY_S = 0.02
KILL_BOUND_S = 5.0
"""How long survivors of SIGKILL are hunted before the receipt says that cleanup is not confirmed."""
LOCK_BOUND_S = 15.0
"""How long another finisher is waited for. The agent can take the lock as well: then the work is done without it."""
NAMED_MAX = 256
"""Survivors that a receipt names one by one; `detail` has their number when there are more."""


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
        reaped += reap_all() if adopted else 0
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


def below_this() -> list[processes.Process]:
    """List what runs below this process, and reap the rest. Not by a session's signs: another activation may bear them."""
    reap_all()
    return [process for process in processes.descendants((os.getpid(),), processes.every()) if not process.dead]


def _is_of(receipt: Receipt, session: SessionPaths) -> bool:
    return receipt.session_id == os.path.basename(session.path) and receipt.request_digest == claim_of(session)


def reap_all() -> int:
    """Reap what is dead of this process's children; return how many."""
    reaped = 0
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            reaped += 1
    return reaped


def _unaccounted(session: SessionPaths) -> list[processes.Process] | None:
    """List what may be the session's and bears no sign; None when nothing tells what ran before it."""
    before = introduction(session).get("before")
    if not isinstance(before, list):
        return None if os.path.lexists(session.evidence) else []
    return processes.unaccounted({pair for one in before if (pair := process_key(one))}, processes.every())


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
        agent=str(introduction(session).get("agent", ""))[:64],
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
