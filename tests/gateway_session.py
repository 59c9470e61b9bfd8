# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A real gateway process with a test in the place of its supervisor: events are collected, nothing is judged."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from boxstrap.runner.gateway_process import GatewayProcess
from boxstrap.runner.layout import SessionPaths
from boxstrap.runner.wire import Kind, Model, Request


class GatewaySession:
    """One gateway before a model. `events` grows while it runs, and is complete after the `with` block."""

    def __init__(
        self, model: Model, folder: Path, *, max_calls: int | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        request = Request(session_id="s", agent="command", workdir="/", prompt="", model=model, max_policy_calls=max_calls)
        environ = {"PATH": os.environ["PATH"], **(env or {})}
        self.process = GatewayProcess(request, model, SessionPaths(str(folder)), environ, self._record)
        self.url = self.process.model.url
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The data of each model_call."""
        return [data for kind, data in self.events if kind == "model_call"]

    def connect(self) -> socket.socket:
        """Open a bare connection to it."""
        parts = urlsplit(self.url)
        return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=20)

    def exchange(self, request: bytes) -> bytes:
        """Send bytes on a connection of their own, and give all that comes back until it is closed."""
        with self.connect() as client:
            client.sendall(request)
            answer = b""
            while piece := client.recv(65536):
                answer += piece
            return answer

    def __enter__(self) -> GatewaySession:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.hang_up()
        self._reader.join(20)
        os.waitpid(self.process.pid, 0)

    def _record(self, kind: Kind, data: Mapping[str, object]) -> None:
        self.events.append((kind.value, dict(data)))

    def _read(self) -> None:
        os.set_blocking(self.process.pump.fd, True)
        while self.process.pump.read():
            continue
