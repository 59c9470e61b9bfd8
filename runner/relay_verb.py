# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The box's end of the controller's exec: joins its standard streams to the gateway's relay socket.

    relay --session DIR --controller ID [--poll --ack N --wait S --batch N --answers BASE64|@FILE]

With --poll it exchanges once and prints one JSON object (a wire.Answer). It understands no frame, and refuses to go anywhere
but to the socket in the session's folder. It imports little and parses by hand: each relayed call waits for it twice.
"""

from __future__ import annotations

import binascii
import json
import os
import select
import socket
import sys
import time

SOCKET = "relay.sock"
"""As layout.py calls it."""
CONNECT_BOUND_S = 30.0
"""How long it waits for a session that is just starting."""
_RETRY_S = 0.05
_READ = 256 * 1024


def main(argv: list[str]) -> int:
    """Run the verb and return the exit status (wire.ExitStatus)."""
    given = {"--ack": "0", "--wait": "0", "--batch": "0", "--answers": ""}
    words = iter(argv)
    try:
        given.update((word, next(words) if word not in {"--poll", "--json"} else "yes") for word in words)
        session, controller = given["--session"], given["--controller"]
        if "--poll" not in given:
            return hold(session, controller)
        ack, batch, wait_s = int(given["--ack"]), int(given["--batch"]), float(given["--wait"])
    except (KeyError, ValueError, RuntimeError) as error:
        print(f"boxstrap: relay: {error!r}; see sh boxstrap.pyz relay --help", file=sys.stderr)
        return 64
    said = poll(session, controller, ack=ack, wait_s=wait_s, batch=batch, brought=given["--answers"])
    gone = {"code": "session-missing", "message": "There is no gateway.", "remedy": "The session has ended."}
    answer = {"v": 1, "ok": said is not None, "failure": gone if said is None else None, "data": said}
    print(json.dumps(answer))
    return 69 if said is None else 0


def hold(session: str, controller: str) -> int:
    """Copy both ways until either side ends; 0 then, 1 when there is no gateway."""
    gateway = _connect(session)
    if gateway is None:
        return 1
    _hello(gateway, {"mode": "hold", "controller": controller})
    while True:
        ready, _, _ = select.select([0, gateway.fileno()], [], [])
        if gateway.fileno() in ready:
            data = gateway.recv(_READ)
            if not data:
                return 0
            _write(1, data)
        if 0 in ready:
            data = os.read(0, _READ)
            if not data:
                return 0
            gateway.sendall(data)


def poll(session: str, controller: str, *, ack: int, wait_s: float, batch: int, brought: str) -> dict[str, object] | None:
    """Bring answers (base64, or @FILE with the bytes), and take what the gateway has to say; None when there is no gateway."""
    gateway = _connect(session)
    if gateway is None:
        return None
    if brought.startswith("@"):
        with open(brought[1:], "rb") as file:
            data = file.read()
        os.unlink(brought[1:])
    else:
        data = binascii.a2b_base64(brought)
    _hello(gateway, {"mode": "poll", "controller": controller, "ack": ack, "wait": wait_s, "batch": batch, "bytes": len(data)})
    gateway.sendall(data)
    answer = bytearray()
    while piece := gateway.recv(_READ):
        answer += piece
    head, _, frames = bytes(answer).partition(b"\n")
    if not head:
        return None
    return {**json.loads(head), "data": binascii.b2a_base64(frames, newline=False).decode("ascii")}


def _connect(session: str) -> socket.socket | None:
    """Reach the gateway, or learn that it is gone; a session that is just starting is waited for."""
    bound = time.monotonic() + CONNECT_BOUND_S
    while True:
        gateway = socket.socket(socket.AF_UNIX)
        try:
            folder = os.open(session, os.O_PATH | os.O_DIRECTORY)
            try:
                gateway.connect(f"/proc/self/fd/{folder}/{SOCKET}")
            finally:
                os.close(folder)
            return gateway
        except OSError:
            gateway.close()
            if time.monotonic() > bound or _is_over(session):
                return None
            time.sleep(_RETRY_S)


def _is_over(session: str) -> bool:
    from boxstrap.runner import receipts  # noqa: PLC0415 (only who finds no gateway pays for it)
    from boxstrap.runner.layout import SessionPaths  # noqa: PLC0415 (the same)

    return receipts.state_of(SessionPaths(session)) in {"ended", "lost"}


def _hello(gateway: socket.socket, said: dict[str, object]) -> None:
    gateway.sendall(json.dumps(said).encode() + b"\n")


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
