# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The box's end of the controller's exec: joins its standard streams to the gateway's relay socket.

It understands no frame, and refuses to go anywhere but to the socket in the session's folder.
"""

from __future__ import annotations

import base64
import json
import os
import select
import socket
import time

from boxstrap.runner import receipts
from boxstrap.runner.layout import SessionPaths

CONNECT_BOUND_S = 30.0
"""How long it waits for a session that is just starting."""
_RETRY_S = 0.05
_READ = 256 * 1024


def hold(session: SessionPaths, controller: str) -> int:
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


def poll(
    session: SessionPaths, controller: str, *, ack: int, wait_s: float, batch: int, brought: str
) -> dict[str, object] | None:
    """Bring answers (base64, or @FILE with the bytes), and take what the gateway has to say; None when there is no gateway."""
    gateway = _connect(session)
    if gateway is None:
        return None
    if brought.startswith("@"):
        with open(brought[1:], "rb") as file:
            data = file.read()
        os.unlink(brought[1:])
    else:
        data = base64.b64decode(brought)
    _hello(gateway, {"mode": "poll", "controller": controller, "ack": ack, "wait": wait_s, "batch": batch, "bytes": len(data)})
    gateway.sendall(data)
    answer = bytearray()
    while piece := gateway.recv(_READ):
        answer += piece
    head, _, frames = bytes(answer).partition(b"\n")
    if not head:
        return None
    return {**json.loads(head), "data": base64.b64encode(frames).decode("ascii")}


def _connect(session: SessionPaths) -> socket.socket | None:
    """Reach the gateway, or learn that it is gone; a session that is just starting is waited for."""
    bound = time.monotonic() + CONNECT_BOUND_S
    while True:
        gateway = socket.socket(socket.AF_UNIX)
        try:
            folder = os.open(os.path.dirname(session.relay), os.O_PATH | os.O_DIRECTORY)
            try:
                gateway.connect(f"/proc/self/fd/{folder}/{os.path.basename(session.relay)}")
            finally:
                os.close(folder)
            return gateway
        except OSError:
            gateway.close()
            if time.monotonic() > bound or receipts.state_of(session) in {"ended", "lost"}:
                return None
            time.sleep(_RETRY_S)


def _hello(gateway: socket.socket, said: dict[str, object]) -> None:
    gateway.sendall(json.dumps(said).encode() + b"\n")


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
