# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The line between a controller and its Docker engine, and scissors: a unix socket before the engine's own that can be cut."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit


class CutLine:
    """`with CutLine(folder) as line`: connect to `line.url`; `line.cut()` breaks what is open and refuses what comes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "engine.sock"
        self.url = f"unix://{self._path}"
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self._path))
        self._server.listen(128)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.is_cut = False
        self.connections = 0

    def __enter__(self) -> CutLine:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cut()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._path.unlink()

    def cut(self) -> None:
        """Break every connection, at any byte, and refuse new ones until `mend`."""
        with self._lock:
            self.is_cut = True
            broken, self._open = self._open, set()
        for one in broken:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Let connections through again."""
        with self._lock:
            self.is_cut = False

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            with self._lock:
                refused = self.is_cut
                if not refused:
                    self._open |= {near, far}
                    self.connections += 1
            try:
                if refused:
                    raise ConnectionRefusedError
                far.connect(urlsplit(os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock").path)
            except OSError:
                near.close()
                far.close()
                continue
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
        with self._lock:
            self._open.discard(source)
