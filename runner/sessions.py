# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A session seen from outside its supervisor: claim and launch it, attach, tail, stop, remove.

Any number of processes may do this at once; the claim decides. It refuses to start a second activation.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import signal
import sys
import time

from boxstrap.runner import environment, processes, receipts
from boxstrap.runner.layout import RuntimePaths, SessionPaths
from boxstrap.runner.supervisor import supervise
from boxstrap.runner.wire import (
    REQUEST_MAX,
    TAIL_CHUNK_MAX,
    Code,
    Failure,
    Receipt,
    Request,
    Tail,
    request_digest,
    request_from,
)

POLL_S = 0.02
STOP_MARGIN_S = 20.0


def read_request(session: SessionPaths) -> tuple[Request, str] | Failure:
    """Read request.json and compute its digest, or say what is wrong with it."""
    remedy = "Put a request.json of this version into the session folder, or open the session anew."
    try:
        with open(session.request, "rb") as file:
            raw = file.read(REQUEST_MAX + 1)
    except OSError as error:
        return Failure(code=Code.SESSION_MISSING, message=f"{session.request}: {error.strerror}.", remedy=remedy)
    if len(raw) > REQUEST_MAX:
        return Failure(code=Code.BAD_REQUEST, message=f"request.json has more than {REQUEST_MAX} bytes.", remedy=remedy)
    try:
        request = request_from(raw)
    except ValueError as error:
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
    read = read_request(session)
    if isinstance(read, Failure):
        return read
    request, digest = read
    with contextlib.suppress(OSError):
        os.chmod(session.path, 0o700)
        os.chmod(session.request, 0o600)
    if not os.path.isdir(request.workdir):
        return Failure(
            code=Code.WORKDIR_MISSING,
            message=f"The workdir {request.workdir} is not a folder here.",
            remedy="Give the folder that holds the task's repo with --workdir.",
        )
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
    if not hold and os.fork() != 0:
        return _started(session)
    if not hold:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
    processes.become_subreaper()
    child = os.fork()
    if child == 0:
        os._exit(_supervise_or_say(request, digest, session, runtime))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.waitpid(child, 0)
    if receipts.receipt_of(session) is None:
        receipts.finish_lost(session, request, digest, adopted=True)
    if not hold:
        os._exit(0)
    return {"state": "ended", "attached": False}


def _supervise_or_say(request: Request, digest: str, session: SessionPaths, runtime: RuntimePaths) -> int:
    try:
        return supervise(request, digest, session, runtime, environment.initial())
    except BaseException:  # noqa: BLE001
        # Broad on purpose: whatever breaks here is our bug; supervisor.log gets the traceback, the parent writes the receipt.
        sys.excepthook(*sys.exc_info())
        return 70


def _attach(session: SessionPaths, digest: str, *, hold: bool) -> dict[str, object] | Failure:
    claim = receipts.claim_of(session)
    if claim == receipts.STOPPED_CLAIM:
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


def tail(session: SessionPaths, *, start: int, wait_s: float) -> Tail:
    """Return evidence from byte `start` on: as soon as there is a whole line, when the state is final, or after `wait_s`."""
    bound = time.monotonic() + wait_s
    looked_at, state = 0.0, "absent"
    while True:
        now = time.monotonic()
        if now - looked_at >= 0.1 or now >= bound:
            looked_at, state = now, receipts.state_of(session)
        final = state in {"ended", "lost"}
        data, size = _slice(session.evidence, start, torn=final)
        if data or final or now >= bound:
            return Tail(
                start=start,
                next=start + len(data),
                size=size,
                chunk=base64.b64encode(data).decode("ascii"),
                state=state,
                claim=receipts.claim_of(session),
                receipt=receipts.receipt_of(session) if state == "ended" else None,
            )
        time.sleep(POLL_S)


def _slice(path: str, start: int, *, torn: bool) -> tuple[bytes, int]:
    """Read whole lines from `start`; a line without its end only when `torn` lines will not grow any more."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(start)
            data = file.read(TAIL_CHUNK_MAX)
    except OSError:
        return b"", 0
    if start + len(data) < size or not torn:
        end = data.rfind(b"\n") + 1
        data = data[:end] if end or len(data) < TAIL_CHUNK_MAX else data
    return data, size


def stop(session: SessionPaths, *, wait_s: float | None = None) -> Receipt | dict[str, object] | Failure:
    """Stop the session and return its receipt; before any start, claim it so that it never starts.

    Returns:
        The receipt; or a dict whose state is "running" when it did not end within `wait_s` seconds (default: the
        request's grace and a margin); or a Failure when there is nothing to stop.
    """
    read = read_request(session)
    if not receipts.claim_of(session):
        try:
            os.symlink(receipts.STOPPED_CLAIM, session.claim)
            return {"state": "stopped"}
        except FileExistsError:
            pass
        except OSError as error:
            return Failure(
                code=Code.SESSION_MISSING, message=f"{session.path}: {error.strerror}.", remedy="Check the session's folder."
            )
    if receipts.claim_of(session) == receipts.STOPPED_CLAIM:
        return {"state": "stopped"}
    if isinstance(read, Failure):
        return read
    request, digest = read
    with contextlib.suppress(OSError):
        os.close(os.open(session.stop, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    bound = time.monotonic() + (request.grace_s + STOP_MARGIN_S if wait_s is None else wait_s)
    state = receipts.state_of(session)
    told = False
    while state == "running" and time.monotonic() < bound:
        supervisor = receipts.supervisor_alive(session)
        if supervisor and not told:
            process = processes.read(supervisor[0])
            if process is not None and process.start == supervisor[1]:
                processes.send(process, signal.SIGTERM)
                told = True
        time.sleep(POLL_S)
        state = receipts.state_of(session)
    if state == "running":
        return {"state": "running"}
    receipt = receipts.receipt_of(session)
    if receipt is None or not receipt.cleanup_confirmed:
        receipt = receipts.finish_lost(session, request, digest, adopted=False)
    return receipt


def remove(session: SessionPaths) -> Failure | None:
    """Remove the folder of a session that has ended, and the session root if it is empty then."""
    state = receipts.state_of(session)
    if state == "running":
        return Failure(code=Code.SESSION_CONFLICT, message="The session is still running.", remedy="Stop it first.")
    shutil.rmtree(session.path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(session.path))
    return None


def status(session: SessionPaths) -> dict[str, object] | Failure:
    """Say where the session stands: state, claim, supervisor, processes, evidence, receipt."""
    if not os.path.isdir(session.path):
        return Failure(
            code=Code.SESSION_MISSING,
            message=f"There is no session at {session.path}.",
            remedy="List the session root to see which there are.",
        )
    supervisor = receipts.supervisor_alive(session)
    receipt = receipts.receipt_of(session)
    session_id = os.path.basename(session.path)
    running = processes.marked(f"BOXSTRAP_SESSION={session_id}".encode(), processes.every())
    evidence = _slice(session.evidence, 0, torn=True)[1]
    return {
        "state": receipts.state_of(session),
        "claim": receipts.claim_of(session),
        "supervisor_pid": supervisor[0] if supervisor else None,
        "processes": [{"pid": process.pid, "name": process.name} for process in running],
        "evidence_bytes": evidence,
        "receipt": None if receipt is None else {**receipt.__dict__, "survivors": [vars(one) for one in receipt.survivors]},
    }
