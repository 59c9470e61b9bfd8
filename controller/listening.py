# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A server of its own for a Sink, for whoever has none that could mount it: uvicorn, in the event loop that runs.

It leaves the process's signal handlers, logging and event loop as they are. It refuses https, for which it has no certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from boxstrap.controller.errors import UsageError
from boxstrap.controller.sink import Sink

CONNECTIONS_MAX = 2000
"""At once; also at most half of the files that this process may have open. Boxes beyond that are not heard, but pulled."""
HEAD_S = 10.0
"""How long a new connection may be silent."""
KEEP_S = 15
"""How long a box's idle connection is kept: it pushes every few seconds."""
CLOSE_S = 1


@asynccontextmanager
async def listening(url: str, *, host: str | None = None) -> AsyncIterator[Sink]:
    """Serve a Sink for as long as the context is open.

    Args:
        url: where the boxes reach this host, http only. Port 0: one that is free.
        host: the address to listen on. Default: the URL's host where it is one of this machine's, and else all of them.

    Raises:
        UsageError: the URL is none that can be served, or its port is taken.
    """
    parts = urlsplit(url)
    if parts.scheme != "http":
        raise UsageError(
            f"Found sink {url!r}, needed http://: a plain listener has no certificate.",
            remedy="For https, mount controller.sink.Sink in a server of your own.",
        )
    if not parts.hostname:
        raise UsageError(f"Found sink {url!r}, needed http://HOST:PORT.", remedy="Give it as a box reaches it.")
    try:
        port = 80 if parts.port is None else parts.port
        bound = await asyncio.to_thread(_bind, parts.hostname, port, host)
    except (OSError, ValueError) as error:
        raise UsageError(f"The sink {url} could not be served: {error}.", remedy="Choose another port.") from error
    with contextlib.closing(bound):
        # asyncio overlooks sockets of this origin, and a reply in two pieces would wait 40 ms for the box's acknowledgement.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        sink = Sink(f"http://{name}:{bound.getsockname()[1]}{parts.path}")
        server = _Server(_config(sink))
        serving = asyncio.ensure_future(server.serve(sockets=[bound]))
        try:
            yield sink
        finally:
            server.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)


def _bind(name: str, port: int, host: str | None) -> socket.socket:
    if host is not None:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(found[4][:2], family=found[0])
    except OSError:  # a name or an address that only the boxes know
        return socket.create_server(("", port))


class _Config(uvicorn.Config):
    def configure_logging(self) -> None:
        """Leave it to the process."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them to the process."""
        yield


def _config(sink: Sink) -> uvicorn.Config:
    most = min(CONNECTIONS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

    class Protocol(H11Protocol):
        """A connection that writes no log of accesses, takes no place from others by silence, and says when it ends."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.access_log = False
            if len(self.connections) > most:
                transport.abort()
            else:
                self.loop.call_later(HEAD_S, self.hurry)

        def hurry(self) -> None:
            if self.cycle is None:
                self.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            sink.disconnected(self.client)

    return _Config(
        sink,
        http=Protocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_S,
        timeout_graceful_shutdown=CLOSE_S,
    )
