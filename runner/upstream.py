# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The model's own server, reached from the sandbox: one HTTP request at a time over connections that are kept for a moment.

TLS trusts what authorities.py says. The task's proxy variables are the task's: they are not used (a box that cannot reach its
model uses the relay). It refuses to retry: a request is sent once or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Protocol
from urllib.parse import urlsplit

import h11

from boxstrap.runner import authorities
from boxstrap.runner.wire import Model

Headers = list[tuple[bytes, bytes]]

CONNECT_MAX_S = 30.0
KEEP_S = 4.0
"""How long an idle connection may be used again: below the five seconds after which common servers close one."""
_READ = 128 * 1024
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding "
    b"upgrade".split()
)


KINDS = {"unreachable": 502, "timeout": 504, "cut": 502, "relay_lost": 503}
"""One word for why the model gave no answer, and the status with which the agent hears of it."""


class UpstreamError(Exception):
    """The model gave no answer. `kind` is one of KINDS."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass
class Reply:
    """An answer whose body is still to come. `headers` are end to end, without cookies."""

    status: int
    headers: Headers
    chunks: AsyncIterator[bytes]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request for the model: the method and path that the agent used, its end-to-end headers, the body."""

    method: str
    path: str
    dialect: str
    headers: Headers
    body: bytes


class Upstream(Protocol):
    """Where calls go: the model itself, or the controller."""

    def send(self, ask: Ask) -> contextlib.AbstractAsyncContextManager[Reply]:
        """Send one request and give its answer.

        Raises:
            UpstreamError: no answer came, or it broke off (also from the chunks).
        """


@dataclass
class _Link:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    since: float = 0.0
    http: h11.Connection = field(default_factory=lambda: h11.Connection(h11.CLIENT))

    @property
    def usable(self) -> bool:
        """Whether an idle connection is still young, and the other side has neither closed it nor said anything."""
        buffered = getattr(self.reader, "_buffer", b"")
        return time.monotonic() - self.since < KEEP_S and not self.reader.at_eof() and not buffered


class Direct:
    """The model's URL. Cookies that it sets live here, apart from any that the agent has."""

    def __init__(self, model: Model) -> None:
        parts = urlsplit(model.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"found model url {model.url!r}, needed http://host or https://host")
        self._host, self._secure = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._host_header = parts.netloc.rpartition("@")[2].encode("idna" if parts.netloc.isascii() is False else "ascii")
        self._added = [(name.lower().encode("ascii"), value.encode("utf-8")) for name, value in model.headers.items()]
        self._connect_s = min(CONNECT_MAX_S, model.timeout_s)
        self._cookies: dict[str, str] = {}
        self._idle: list[_Link] = []
        self._tls = authorities.tls() if self._secure else None

    @contextlib.asynccontextmanager
    async def send(self, ask: Ask) -> AsyncIterator[Reply]:
        """Send one request and give its answer.

        Raises:
            UpstreamError: no answer came, or it broke off (also from the chunks).
        """
        link = self._take() or await self._connect()
        kept = False
        try:
            with _cut():
                target = ask.path.encode("ascii", "backslashreplace")
                head = h11.Request(method=ask.method, target=target, headers=self._headers(ask))
                parts = [head, *([h11.Data(data=ask.body)] if ask.body else []), h11.EndOfMessage()]
                link.writer.write(b"".join(link.http.send(part) or b"" for part in parts))
                await link.writer.drain()
                response = await self._head(link)
            yield Reply(response.status_code, self._kept(response.headers), self._body(link))
            kept = self._keep(link)
        finally:
            if not kept:
                link.writer.close()

    async def _head(self, link: _Link) -> h11.Response:
        while True:
            event = await _next(link)
            if isinstance(event, h11.Response):
                return event

    async def _body(self, link: _Link) -> AsyncIterator[bytes]:
        with _cut():
            while True:
                event = await _next(link)
                if isinstance(event, h11.Data):
                    yield bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    return

    def _take(self) -> _Link | None:
        while self._idle:
            link = self._idle.pop()
            if link.usable:
                return link
            link.writer.close()
        return None

    def _keep(self, link: _Link) -> bool:
        try:
            link.http.start_next_cycle()
        except h11.ProtocolError:
            return False
        link.since = time.monotonic()
        self._idle.append(link)
        return True

    async def _connect(self) -> _Link:
        try:
            async with asyncio.timeout(self._connect_s):
                return _Link(*await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=2 * _READ))
        except TimeoutError as error:
            raise UpstreamError("unreachable", f"no connection to the model within {self._connect_s:g} s") from error
        except (OSError, ValueError) as error:
            raise UpstreamError("unreachable", f"no connection to the model: {type(error).__name__}: {error}") from error

    def _headers(self, ask: Ask) -> Headers:
        added = {name for name, _ in self._added}
        headers = [(b"host", self._host_header)]
        headers += [(name, value) for name, value in ask.headers if name not in added]
        headers += self._added
        if self._cookies:
            headers.append((b"cookie", "; ".join(f"{name}={value}" for name, value in self._cookies.items()).encode()))
        if ask.method == "POST":
            headers.append((b"content-length", b"%d" % len(ask.body)))
        return headers

    def _kept(self, headers: Iterable[tuple[bytes, bytes]]) -> Headers:
        found = list(headers)
        for name, value in found:
            if name == b"set-cookie":
                self._remember(value.decode("latin-1"))
        return [(name, value) for name, value in end_to_end(found) if name != b"set-cookie"]

    def _remember(self, cookie: str) -> None:
        try:
            jar = SimpleCookie(cookie)
        except CookieError:
            return
        for name, morsel in jar.items():
            if morsel["max-age"] == "0" or "1970" in morsel["expires"]:
                self._cookies.pop(name, None)
            else:
                self._cookies[name] = morsel.coded_value


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Leave out what belongs to one connection: the hop-by-hop headers, and those that Connection names."""
    found = [(bytes(name), bytes(value)) for name, value in headers]
    named = {word.strip().lower() for name, value in found if name == b"connection" for word in value.split(b",")}
    return [(name, value) for name, value in found if name not in HOP_BY_HOP | named]


async def _next(link: _Link) -> object:
    while True:
        event = link.http.next_event()
        if event is not h11.NEED_DATA:
            if isinstance(event, h11.ConnectionClosed):
                raise UpstreamError("cut", "the model closed the connection before its answer")
            return event
        link.http.receive_data(await link.reader.read(_READ))


@contextlib.contextmanager
def _cut() -> Iterator[None]:
    try:
        yield
    except h11.RemoteProtocolError as error:
        raise UpstreamError("cut", f"the model's answer broke off: {error}") from error
    except OSError as error:
        raise UpstreamError("cut", f"the connection to the model broke: {type(error).__name__}: {error}") from error
