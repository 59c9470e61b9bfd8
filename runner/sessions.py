# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A session seen from outside its supervisor: claim and launch it, attach, stop, remove.

Any number of processes may do this at once; the claim decides. It refuses to start a second activation.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from dataclasses import asdict

from boxstrap.runner import environment, finish, processes, receipts, warm, watchdog
from boxstrap.runner.layout import RuntimePaths, SessionPaths
from boxstrap.runner.supervisor import supervise
from boxstrap.runner.tail import POLL_S, let_go_on, read_slice
from boxstrap.runner.wire import (
    REQUEST_MAX,
    STOPPED_CLAIM,
    WARM_MAX_S,
    Code,
    Failure,
    Receipt,
    Request,
    request_digest,
    request_from,
)

STOP_MARGIN_S = 20.0
GRACE_MAX_S = 60.0
"""What of the request's grace a stop waits for: the agent may have written another request there."""


def read_request(session: SessionPaths, *, prewarm: bool = False) -> tuple[Request, str] | Failure:
    """Read request.json, or prewarm.json, and compute its digest, or say what is wrong with it."""
    path = session.prewarm if prewarm else session.request
    remedy = f"Put a {os.path.basename(path)} of this version into the session folder, or open the session anew."
    try:
        raw = receipts.read_file(path, REQUEST_MAX)
    except OSError as error:
        return Failure(code=Code.SESSION_MISSING, message=f"{path}: {error.strerror}.", remedy=remedy)
    try:
        request = request_from(raw)
    except (ValueError, RecursionError) as error:
        return Failure(code=Code.BAD_REQUEST, message=f"{error}.", remedy=remedy)
    return request, request_digest(request)


def launch(session: SessionPaths, runtime: RuntimePaths, *, hold: bool) -> dict[str, object] | Failure:
    """Claim the session and start its supervisor, or attach to the one that the same request started.

    Args:
        session: a folder that holds request.json.
        runtime: the published runtime that the agent runs on.
        hold: stay as the supervisor's parent until it is done. The parent adopts and finishes if the supervisor is
            killed; a child of PID 1 would stay a zombie in the many boxes whose PID 1 does not wait.
    """
    read = _ready(session)
    if isinstance(read, Failure):
        return read
    request, digest = read
    try:
        os.symlink(digest, session.claim)
    except FileExistsError:
        return _attach(session, digest, hold=hold)
    except OSError as error:
        return Failure(
            code=Code.NOT_WRITABLE,
            message=f"{session.claim}: {error.strerror}.",
            remedy="Give a --session-root that is writable.",
        )
    if warm.taken(session, digest):
        return _attach(session, digest, hold=False)
    if not hold and os.fork() != 0:
        return _started(session)
    if not hold:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
    watchdog.guard(
        request,
        session,
        lambda tell, me: supervise(request, digest, session, runtime, environment.initial(), watchdog=me, tell=tell),
    )
    if not hold:
        os._exit(0)
    return {"state": "ended", "attached": False}


def prewarm(session: SessionPaths, runtime: RuntimePaths) -> dict[str, object] | Failure:
    """Start a supervisor that waits for the request of a session that is open, and be its parent until it is done.

    It starts everything that prewarm.json, the request without its prompt, is enough for; whoever launches hands over to it.
    """
    read = _ready(session, prewarm=True)
    if isinstance(read, Failure):
        return read
    if not warm.offer(session):
        return {"state": receipts.state_of(session), "attached": True}
    watchdog.guard(
        read[0],
        session,
        lambda tell, me: supervise(read[0], "", session, runtime, environment.initial(), watchdog=me, tell=tell),
        waits_s=WARM_MAX_S,
    )
    return {"state": receipts.state_of(session), "attached": False}


def _ready(session: SessionPaths, *, prewarm: bool = False) -> tuple[Request, str] | Failure:
    """Read what is to be run, keep it private, and see that its workdir is there."""
    read = read_request(session, prewarm=prewarm)
    if isinstance(read, Failure):
        return read
    with contextlib.suppress(OSError):
        os.chmod(session.path, 0o700)
        os.chmod(session.prewarm if prewarm else session.request, 0o600)
    if not os.path.isdir(read[0].workdir):
        return Failure(
            code=Code.WORKDIR_MISSING,
            message=f"The workdir {read[0].workdir} is not a folder here.",
            remedy="Give the folder that holds the task's repo with --workdir.",
        )
    return read


def _attach(session: SessionPaths, digest: str, *, hold: bool) -> dict[str, object] | Failure:
    claim = receipts.claim_of(session)
    if claim == STOPPED_CLAIM:
        return Failure(
            code=Code.SESSION_STOPPED,
            message="This session was stopped before it was started.",
            remedy="Open a session with another id.",
        )
    if claim != digest:
        return Failure(
            code=Code.SESSION_CONFLICT,
            message=f"This session belongs to request {claim[:16]}, found request {digest[:16]}.",
            remedy="Repeat the first request as it was, or open a session with another id.",
        )
    while hold and receipts.state_of(session) == "running":
        time.sleep(POLL_S)
    return {"state": receipts.state_of(session), "attached": True}


def _started(session: SessionPaths) -> dict[str, object]:
    bound = time.monotonic() + receipts.STARTING_BOUND_S
    while not os.path.lexists(session.supervisor) and time.monotonic() < bound:
        time.sleep(POLL_S)
    return {"state": receipts.state_of(session), "attached": False}


def stop(session: SessionPaths, *, wait_s: float | None = None) -> Receipt | dict[str, object] | Failure:
    """Stop the session and return its receipt; before any start, claim it so that it never starts.

    What the session's own supervisor does not finish within the bound, this does in its place. A receipt that confirms
    nothing, or that lies there while something of the session runs, is made true.

    Returns:
        The receipt; or a dict whose state is "running" when it did not end within `wait_s` seconds, where those were
        given (default: the request's grace and a margin, and then the end by force); or a Failure when there is nothing.
    """
    if not receipts.claim_of(session):
        try:
            os.symlink(STOPPED_CLAIM, session.claim)
        except FileExistsError:
            pass
        except OSError as error:
            return Failure(
                code=Code.SESSION_MISSING, message=f"{session.path}: {error.strerror}.", remedy="Check the session's folder."
            )
    if receipts.claim_of(session) == STOPPED_CLAIM:
        if os.path.lexists(session.warm):
            warm.dismiss(session)
        return {"state": "stopped"}
    read = read_request(session)
    grace_s = 0.0 if isinstance(read, Failure) else min(read[0].grace_s, GRACE_MAX_S)
    with contextlib.suppress(OSError):
        os.close(os.open(session.stop, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600))
    _tell(session, signal.SIGTERM)
    bound = time.monotonic() + (grace_s + STOP_MARGIN_S if wait_s is None else wait_s)
    while receipts.state_of(session) == "running" and time.monotonic() < bound:
        time.sleep(POLL_S)
    if receipts.state_of(session) == "running":
        if wait_s is not None:
            return {"state": "running"}
        _tell(session, signal.SIGKILL)
    return finish.finish(session, adopted=False)


def _tell(session: SessionPaths, number: signal.Signals) -> None:
    """Signal the supervisor, and let it and its parent go on where the agent has stopped them."""
    found = receipts.supervisor_alive(session)
    process = processes.read(found[0]) if found else None
    if found and process is not None and process.start == found[1]:
        processes.send(process, number)
    let_go_on(session)


def remove(session: SessionPaths) -> Failure | None:
    """Remove the folder of a session that has ended, and the session root if it is empty then."""
    if receipts.state_of(session) == "running":
        return Failure(code=Code.SESSION_CONFLICT, message="The session is still running.", remedy="Stop it first.")
    left = finish.left_of(session)
    if left:
        names = ", ".join(f"{process.pid} ({process.name})" for process in left[:5])
        return Failure(
            code=Code.CLEANUP_UNCONFIRMED,
            message=f"{len(left)} processes of the session would not go: {names}.",
            remedy="Stop it again; what another user started needs that user, or root.",
        )
    with contextlib.suppress(RecursionError):
        shutil.rmtree(session.path, ignore_errors=True)
    if os.path.lexists(session.path):  # folders nested deeper than Python's own walk goes
        with contextlib.suppress(OSError):
            subprocess.call(["rm", "-rf", "--", session.path], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(session.path))
    return None


def status(session: SessionPaths) -> dict[str, object] | Failure:
    """Say where the session stands: state, claim, supervisor, processes, evidence, receipt. Finishes for a lost supervisor."""
    if not os.path.isdir(session.path):
        return Failure(
            code=Code.SESSION_MISSING,
            message=f"There is no session at {session.path}.",
            remedy="List the session root to see which there are.",
        )
    if receipts.state_of(session) == "lost" and receipts.claim_of(session) != STOPPED_CLAIM:
        finish.finish(session, adopted=False)
    supervisor = receipts.supervisor_alive(session)
    receipt = receipts.receipt_of(session)
    return {
        "state": "warm" if warm.waits(session) else receipts.state_of(session),
        "claim": receipts.claim_of(session),
        "supervisor_pid": supervisor[0] if supervisor else None,
        "processes": [{"pid": process.pid, "name": process.name} for process in finish.left_of(session)],
        "evidence_bytes": read_slice(session.evidence, 0, torn=True)[1],
        "receipt": None if receipt is None else asdict(receipt),
    }
