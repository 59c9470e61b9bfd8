# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A supervisor that was started before its request is known: it waits with all that needs no prompt, and takes what is claimed.

`<session>/warm` names the one process that offers this, `prewarm.json` the request without its prompt. It refuses to take a
request that differs from it in more than the prompt, and to leave anything of itself when none comes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from boxstrap.runner import finish, processes, receipts
from boxstrap.runner.layout import SessionPaths
from boxstrap.runner.wire import REQUEST_MAX, WARM_MAX_S, Request, prewarm_of, request_digest, request_from

HAND_OVER_S = 5.0
"""What a waiting supervisor may take to notice the claim."""
POLL_S = 0.01


def offer(session: SessionPaths) -> bool:
    """Say that what this process starts will wait; False when another did so before, or the session is claimed.

    Who claims looks for the offer afterwards (`taken`): one of the two sees the other.
    """
    me = processes.read(os.getpid())
    try:
        os.symlink(f"{os.getpid()}-{me.start if me is not None else 0}", session.warm)
    except OSError:
        return False
    if not receipts.claim_of(session):
        return True
    withdraw(session)
    return False


def withdraw(session: SessionPaths) -> None:
    """Take the offer back."""
    with contextlib.suppress(OSError):
        os.unlink(session.warm)


def waits(session: SessionPaths) -> bool:
    """Whether a supervisor waits that has taken no request."""
    return receipts.introduction(session).get("claim") == "" and bool(_waiting(session))


def taken(session: SessionPaths, digest: str) -> bool:
    """Let a waiting supervisor take the request that was claimed. False when none has and none will: start another.

    One that does not react is killed before that is said: there is never a second activation.
    """
    if not os.path.lexists(session.warm):
        return False
    bound = time.monotonic() + HAND_OVER_S
    while _waiting(session) and time.monotonic() < bound:
        if receipts.introduction(session).get("claim") == digest:
            return True
        time.sleep(POLL_S)
    if receipts.introduction(session).get("claim") == digest:
        return True
    return not dismiss(session, digest)


def dismiss(session: SessionPaths, digest: str = "") -> bool:
    """Kill whoever waits and what it started; False when it had taken the request `digest` before it died."""
    finish.kill_all(lambda: [*finish.left_of(session), *_waiting(session)])
    if digest and receipts.introduction(session).get("claim") == digest:
        return False
    withdraw(session)
    return True


def claimed(session: SessionPaths, prewarmed: Request, ended: Callable[[float], bool]) -> tuple[Request, str] | None:
    """Wait until a request claims the session, and return it with its digest; None when none came that fits.

    Args:
        session: its folder.
        prewarmed: what the request has to be but for its prompt.
        ended: waits for so many seconds, and says whether to give up.
    """
    bound = time.monotonic() + WARM_MAX_S
    claim = ""
    while not claim:
        if time.monotonic() >= bound or ended(POLL_S):
            return None
        claim = receipts.claim_of(session)
    try:
        request = request_from(receipts.read_file(session.request, REQUEST_MAX))
    except (OSError, ValueError, RecursionError):
        return None
    return (request, claim) if request_digest(request) == claim and prewarm_of(request) == prewarmed else None


def _waiting(session: SessionPaths) -> list[processes.Process]:
    """List the process that made the offer and the supervisor that it introduced, as far as they live."""
    try:
        offered = [int(part) for part in os.readlink(session.warm).split("-")]
    except (OSError, ValueError):
        return []
    keys = (receipts.process_key(offered), receipts.supervisor_alive(session))
    found = (processes.read(key[0]) for key in keys if key is not None and receipts.is_like_this(*key))
    return [process for process in found if process is not None]
