# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The sink of pushed evidence: an ASGI application that an agent server mounts, or that listening.py serves.

    sink = Sink("http://agents.internal:8000/boxstrap")
    app.mount("/boxstrap", sink)
    async with open_session(sandbox, spec, sink=sink) as session: ...

Whoever does not show the token of an open session is answered before his body is read, and a session has one batch here at a
time, of a bounded size. It refuses to parse what it holds: that is the collector's, as for what is pulled.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from boxstrap.controller.errors import UsageError
from boxstrap.controller.inbox import Inbox, Reply
from boxstrap.runner.wire import TAIL_CHUNK_MAX, Acknowledged, to_json

BODY_MAX = TAIL_CHUNK_MAX * 4 // 3 + 2 * 1024 * 1024
"""Bytes of a batch: a chunk in base64, a receipt, and what is around them."""
BODY_S = 10.0
"""How long a batch may take to arrive."""
PATH = "/evidence"
"""Below the sink's URL."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Sink:
    """An ASGI 3 application. `url` is where the *boxes* reach it. It has to run in the event loop of its sessions."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
            raise UsageError(f"Found sink {url!r}, needed http://HOST:PORT/PATH.", remedy="Give it as a box reaches it.")
        self.url = url.rstrip("/")
        self._path = parts.path.rstrip("/") + PATH
        self._inboxes: dict[bytes, Inbox] = {}
        self._busy: set[Inbox] = set()
        self._talking: dict[object, Inbox] = {}

    def register(self) -> Inbox:
        """Make a place for a session, with a token that nobody had before."""
        inbox = Inbox(self.url + PATH, secrets.token_urlsafe(32))
        self._inboxes[_digest(inbox.token)] = inbox
        return inbox

    def unregister(self, inbox: Inbox) -> None:
        """Close it: its token opens nothing any more."""
        self._inboxes.pop(_digest(inbox.token), None)
        self._talking.pop(inbox.client, None)
        inbox.close()

    def disconnected(self, client: object) -> None:
        """Hear from the server, where it can tell, that the connection from an address is closed."""
        inbox = self._talking.pop(client, None)
        if inbox is not None:
            inbox.lost()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take one batch."""
        if scope["type"] != "http":
            return
        status, told = await self._judged(scope, receive)
        body = to_json(told).encode("ascii")
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        headers += {405: [(b"allow", b"POST")], 401: [(b"www-authenticate", b"Bearer")], 503: [(b"retry-after", b"1")]}.get(
            status, []
        )
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _judged(self, scope: Scope, receive: Receive) -> Reply:
        if scope["path"].removeprefix(scope.get("root_path", "")) != PATH and scope["path"] != self._path:
            return _no(404, f"Found no such path, needed {PATH}.")
        if scope["method"] != "POST":
            return _no(405, f"Found method {scope['method'][:20]!r}, needed POST.")
        headers = dict(scope["headers"])
        inbox = self._inbox(headers.get(b"authorization", b""))
        if inbox is None:
            return _no(401, "The token is that of no open session.")
        if inbox.loop is not asyncio.get_running_loop():
            return _no(500, "The sink is served by another event loop than that of its sessions.")
        if int(length if (length := headers.get(b"content-length", b"0")).isdigit() else 0) > BODY_MAX:
            return inbox.reply(413, f"Found {length.decode()[:20]} bytes, needed at most {BODY_MAX}.")
        if inbox in self._busy:
            return inbox.reply(409, "A batch of this session is waiting.")
        self._busy.add(inbox)
        try:
            return await self._taken(inbox, tuple(scope.get("client") or ()), receive)
        finally:
            self._busy.discard(inbox)

    async def _taken(self, inbox: Inbox, client: tuple[object, ...], receive: Receive) -> Reply:
        """Read a batch, and hold it until the session has taken it or the box has gone."""
        try:
            async with asyncio.timeout(BODY_S):
                body = await _read(receive)
        except TimeoutError:
            return inbox.reply(408, f"The batch did not arrive within {BODY_S:g} s.")
        except ConnectionError:
            inbox.lost()
            return inbox.reply(400, "The connection was closed.")
        if body is None:
            return inbox.reply(413, f"Found more than {BODY_MAX} bytes.")
        if client:
            self._talking.pop(inbox.client, None)
            self._talking[client], inbox.client = inbox, client
        offered = asyncio.ensure_future(inbox.offer(body.decode("utf-8", "replace")))
        gone = asyncio.ensure_future(receive())  # gives nothing more but the end of the connection
        try:
            await asyncio.wait({offered, gone}, return_when=asyncio.FIRST_COMPLETED)
            if offered.done():
                return offered.result()
            inbox.lost()
            return inbox.reply(400, "The connection was closed.")
        finally:
            gone.cancel()
            offered.cancel()
            await asyncio.gather(gone, offered, return_exceptions=True)

    def _inbox(self, authorization: bytes) -> Inbox | None:
        scheme, _, token = authorization.partition(b" ")
        inbox = self._inboxes.get(hashlib.sha256(token).digest()) if scheme.lower() == b"bearer" else None
        return inbox if inbox is not None and hmac.compare_digest(inbox.token.encode("ascii"), token) else None


async def _read(receive: Receive) -> bytes | None:
    """Read a request's body; None when it is too large.

    Raises:
        ConnectionError: it broke off.
    """
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the box has gone")
        body += message.get("body", b"")
        if len(body) > BODY_MAX:
            return None
        more = message.get("more_body", False)
    return bytes(body)


def _no(status: int, error: str) -> Reply:
    return status, Acknowledged(next=0, error=error)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("ascii")).digest()
