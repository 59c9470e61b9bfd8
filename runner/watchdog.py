# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The supervisor's parent: lets it go on when someone stopped it, ends it past every bound, finishes for it when it died.

It adopts what the supervisor leaves, so that nothing gets away by losing its parent. It refuses to believe a receipt that
the supervisor did not vouch for: the agent can write one.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from boxstrap.runner import finish, processes, receipts, warm
from boxstrap.runner.layout import SessionPaths
from boxstrap.runner.wire import Request

if TYPE_CHECKING:
    from boxstrap.runner.push import Pusher

MARGIN_S = 90.0
"""What the supervisor may take on top of deadline, grace and kill: activation, draining, a slow disk."""
PUSH_END_S = 3.0
"""How long the watchdog stays for the last batch of pushed evidence; the session has ended by then, for whoever pulls."""


def guard(
    request: Request, session: SessionPaths, supervise: Callable[[int, processes.Process | None], int], *, waits_s: float = 0.0
) -> None:
    """Run `supervise` in a child until its receipt is there, or make one.

    Args:
        request: what the child runs.
        session: its folder.
        supervise: takes the descriptor to vouch on (see receipts.write_receipt) and this process; gives an exit status.
        waits_s: how long the child may wait for its request (warm.py). When it ran none, there is nothing to tell.
    """
    processes.become_subreaper()
    me = processes.read(os.getpid())
    told, tell = os.pipe()
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        os.close(told)
        os._exit(_say(lambda: supervise(tell, me)))
    os.close(tell)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pusher = _pusher(session, waits=waits_s > 0)  # a thread: from here on nothing forks
    _wait(child, bound_s=waits_s + request.deadline_s + request.grace_s + finish.KILL_BOUND_S + MARGIN_S)
    os.set_blocking(told, False)
    said = _all_of(told)
    if waits_s and not said.startswith(receipts.RUNS):
        finish.kill_all(finish.below_this)
        warm.withdraw(session)
    else:
        if not _vouched(said.removeprefix(receipts.RUNS), session):
            finish.finish(session, adopted=True)
        if pusher is not None:
            receipts.take_leave(session)
            pusher.finish(within_s=PUSH_END_S)
    os.close(told)
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def _pusher(session: SessionPaths, *, waits: bool) -> Pusher | None:
    """Start to push the session's evidence, where someone said whereto, or may say so with the request."""
    if not waits and not os.path.lexists(session.sink):
        return None
    try:
        from boxstrap.runner.push import Pusher  # noqa: PLC0415 (http.client is slow to import, and few need it)

        return Pusher(session)
    except Exception:  # noqa: BLE001
        # Broad on purpose: without a thread, or a folder to import from, the evidence is pulled.
        return None


def _say(supervise: Callable[[], int]) -> int:
    try:
        return supervise()
    except BaseException:  # noqa: BLE001
        # Broad on purpose: whatever breaks here is our bug; supervisor.log gets the traceback, the parent writes the receipt.
        sys.excepthook(*sys.exc_info())
        return 70


def _wait(child: int, *, bound_s: float) -> None:
    bound = time.monotonic() + bound_s
    while True:
        pid, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
        if pid and os.WIFSTOPPED(status):
            os.kill(child, signal.SIGCONT)
        elif pid:
            return
        left = bound - time.monotonic()
        if left <= 0:
            os.kill(child, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, max(1.0, min(left, 3600.0)))


def _all_of(told: int) -> bytes:
    try:
        return os.read(told, 4096)
    except OSError:
        return b""


def _vouched(digest: bytes, session: SessionPaths) -> bool:
    """Whether the receipt that lies there is the one that the supervisor wrote."""
    try:
        with open(os.open(session.receipt, receipts.READ_FLAGS), "rb") as file:
            return hashlib.sha256(file.read(receipts.RECEIPT_MAX)).hexdigest().encode() == digest
    except OSError:
        return False
