# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What a session has to tell from a byte offset on: its evidence, and where it stands.

Any number of readers may ask at once. It refuses to believe a receipt while something of the session runs.
"""

from __future__ import annotations

import base64
import os
import signal
import time
from collections.abc import Iterator

from boxstrap.runner import finish, processes, receipts
from boxstrap.runner.layout import SessionPaths
from boxstrap.runner.wire import TAIL_CHUNK_MAX, Tail

POLL_S = 0.02
FOLLOW_BEAT_S = 5.0


def tail(session: SessionPaths, *, start: int, wait_s: float) -> Tail:
    """Return evidence from byte `start` on: as soon as there is a whole line, when the state is final, or after `wait_s`."""
    bound = time.monotonic() + wait_s
    looked_at, state = 0.0, "absent"
    while True:
        now = time.monotonic()
        if now - looked_at >= 0.1 or now >= bound:
            looked_at, state = now, _checked_state(session)
        final = state in {"ended", "lost"}
        data, size = read_slice(session.evidence, start, torn=final)
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


def follow(session: SessionPaths, *, start: int, bound_s: float) -> Iterator[Tail]:
    """Yield what `tail` would answer again and again, until the state is final and everything was told, or `bound_s` is over.

    One process for a whole session in place of one for every reply: starting an interpreter is most of what a reply costs.
    An empty answer every FOLLOW_BEAT_S tells the reader that the stream still stands.
    """
    bound = time.monotonic() + bound_s
    seen = False
    while time.monotonic() < bound:
        told = tail(session, start=start, wait_s=FOLLOW_BEAT_S)
        yield told
        start = told.next
        if (told.state in {"ended", "lost"} and told.next >= told.size) or (seen and told.state == "absent"):
            return
        seen = seen or told.state != "absent"


def _checked_state(session: SessionPaths) -> str:
    """Say where the session stands; a receipt that confirms while something runs is a lie, and the session lost.

    A supervisor that the agent stopped, its watchdog too, is let go on by whoever looks.
    """
    state = receipts.state_of(session)
    if state == "running":
        let_go_on(session)
    receipt = receipts.receipt_of(session) if state == "ended" else None
    return "lost" if receipt is not None and receipt.cleanup_confirmed and finish.left_of(session) else state


def read_slice(path: str, start: int, *, torn: bool) -> tuple[bytes, int]:
    """Read whole lines from `start`, and the size of all; a line without its end only where `torn` ones grow no more."""
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


def let_go_on(session: SessionPaths) -> None:
    """Let the supervisor and its parent go on where the agent has stopped them."""
    said = receipts.introduction(session)
    for found in (receipts.supervisor_alive(session, said), receipts.watchdog_alive(said)):
        process = processes.read(found[0]) if found else None
        if found and process is not None and process.start == found[1] and process.state == "T":
            processes.send(process, signal.SIGCONT)
