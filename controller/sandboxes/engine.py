# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The Docker engine behind awaitables: its blocking SDK in a bounded set of threads, and one exec's stream without a thread.

Process A holds fifty execs open for an hour; process B wants to copy one file. If each held exec sat in a thread, B
would wait for a free one. So only the short calls (create, start, inspect) take a thread, and the stream is read on
the event loop. It refuses to wait for ever: every call of the client that it makes has a timeout of `CALL_TIMEOUT_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import docker
import docker.errors
import requests

from boxstrap.controller.errors import SandboxLost

P = ParamSpec("P")
T = TypeVar("T")

CALL_TIMEOUT_S = 20
"""Seconds that the engine has to answer one call."""
STDOUT, STDERR = 1, 2
_HEADER = 8
_CHUNK = 256 * 1024
_WORKERS = 32
_executor = ThreadPoolExecutor(max_workers=_WORKERS, thread_name_prefix="boxstrap-docker")
_clients: dict[tuple[str | None, ...], docker.DockerClient] = {}
_clients_lock = threading.Lock()

FAILURES = (docker.errors.DockerException, requests.RequestException, OSError)
"""What a call of the SDK raises when the engine or the container says no."""


def shared_client() -> docker.DockerClient:
    """Give the client that the environment names (DOCKER_HOST, …); made once, used by every sandbox. Blocking.

    Raises:
        SandboxLost: no engine answers there.
    """
    key = tuple(os.environ.get(name) for name in ("DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"))
    with _clients_lock:
        if key not in _clients:
            try:
                _clients[key] = docker.from_env(timeout=CALL_TIMEOUT_S, max_pool_size=_WORKERS)
            except FAILURES as error:
                where = key[0] or "the default socket"
                raise SandboxLost(
                    f"No Docker engine answers at {where}: {error}.", remedy="Start it, or point DOCKER_HOST at one."
                ) from error
        return _clients[key]


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call of the SDK in one of our threads; a cancelled wait lets the thread end by the call's timeout."""
    return await asyncio.wrap_future(_executor.submit(function, *args, **kwargs))


def forget(function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Run a blocking call in one of our threads that nobody waits for."""
    with contextlib.suppress(RuntimeError):  # the process is ending
        _executor.submit(function, *args, **kwargs)


class _Recv(Protocol):
    def recv(self, size: int, /) -> bytes: ...
    def sendall(self, data: bytes, /) -> None: ...
    def settimeout(self, seconds: float | None, /) -> None: ...
    def close(self) -> None: ...


class ExecStream:
    """The connection of one running exec: multiplexed output to read, standard input to write.

    A plain socket (unix, TCP) is driven by the event loop. What is none (TLS, ssh) is driven through our threads, half
    a second at a time, so that none of them is held.
    """

    _POLL_S = 0.5

    def __init__(self, connection: Any) -> None:  # SocketIO, SSLSocket or an ssh channel: the SDK has no type for it
        self._response: Any = getattr(connection, "_response", None)
        self._connection = connection
        raw: Any = getattr(connection, "_sock", connection)
        self.plain = type(raw) is socket.socket
        self._socket = cast("_Recv", raw)
        self._turn = threading.Lock()  # OpenSSL does not read and write one connection from two threads
        raw.settimeout(0)
        self._ahead = self._read_ahead()
        if not self.plain:
            raw.settimeout(CALL_TIMEOUT_S)

    @classmethod
    async def start(cls, client: docker.DockerClient, exec_id: str) -> ExecStream:
        """Start a created exec and take over its connection.

        Raises:
            docker.errors.APIError: the engine refused.
        """
        future: Future[ExecStream] = _executor.submit(lambda: cls(client.api.exec_start(exec_id, socket=True)))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_close_late)
            raise

    def _read_ahead(self) -> bytes:
        """Take what the HTTP client read together with the response's head, which the SDK's socket leaves behind.

        A short command's output can arrive in the same packet as the head; without this it is lost without a word.
        """
        reader: Any = getattr(getattr(getattr(self._response, "raw", None), "_fp", None), "fp", None)
        if reader is None:
            return b""
        with contextlib.suppress(OSError, ValueError):
            return bytes(reader.peek() or b"")
        return b""

    async def frames(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield (stream, bytes) until the engine closes the stream."""
        head = bytearray()
        stream, left = 0, 0
        data = self._ahead or await self._recv()
        while data:
            at = 0
            while at < len(data):
                if not left:  # a frame's head: stream, three zeros, length
                    take = data[at : at + _HEADER - len(head)]
                    head += take
                    at += len(take)
                    if len(head) == _HEADER:
                        stream, left = head[0], int.from_bytes(head[4:], "big")
                        head.clear()
                else:
                    piece = data[at : at + left]
                    at += len(piece)
                    left -= len(piece)
                    yield stream, piece
            data = await self._recv()

    async def _recv(self) -> bytes:
        if self.plain:
            return await asyncio.get_running_loop().sock_recv(cast("socket.socket", self._socket), _CHUNK)
        while True:
            with contextlib.suppress(TimeoutError):
                return await in_thread(self._recv_soon)

    def _recv_soon(self) -> bytes:
        raw: Any = self._socket
        if not getattr(raw, "pending", int)():
            ready = select.poll()
            ready.register(raw, select.POLLIN)
            if not ready.poll(self._POLL_S * 1000):
                raise TimeoutError
        with self._turn:
            return self._socket.recv(_CHUNK)

    def _send_all(self, data: bytes) -> None:
        with self._turn:
            self._socket.sendall(data)

    async def send(self, data: bytes) -> None:
        """Write to the command's standard input."""
        if self.plain:
            await asyncio.get_running_loop().sock_sendall(cast("socket.socket", self._socket), data)
        else:
            await in_thread(self._send_all, data)

    def end_input(self) -> None:
        """Let the command read end of file; on a connection that is not plain the command must know where to stop."""
        if self.plain:
            with contextlib.suppress(OSError):
                cast("socket.socket", self._socket).shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Let go of the connection; the command goes on."""
        for one in (self._response, self._connection, self._socket):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # the one closed the other
                one.close()


def _close_late(future: Future[ExecStream]) -> None:
    """Close a stream that arrived after nobody wanted it any more."""
    if not future.cancelled() and future.exception() is None:
        future.result().close()
