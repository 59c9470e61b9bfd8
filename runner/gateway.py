# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The loopback model gateway: a process of the session's supervisor that stands between any agent and its model.

It forwards the three dialects byte for byte, writes one `model_call` event a call, and answers 403 once the policy budget is
used. Any process of the box may reach it: loopback is all the privacy there is. It refuses to retry, and to send one call
more than the budget; the same body again after a failure is the same call, and is told as a retry.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn
from urllib.parse import unquote, urlsplit

import h11

from boxstrap.runner.cache_control import without_cache_control
from boxstrap.runner.calls import GIVEN_UP_CODE, Account, Calls, EventPipe, Refusal
from boxstrap.runner.dialects import CALL_HEADER, INVOCATION_HEADER, Answer, dialect_of
from boxstrap.runner.frames import PATHS, TOOL
from boxstrap.runner.layout import SessionPaths
from boxstrap.runner.relay import Relay
from boxstrap.runner.upstream import KINDS, Ask, Direct, Headers, Upstream, UpstreamError, end_to_end
from boxstrap.runner.wire import BUDGET_CODE, TOOL_FAILED, TOOLS_PATH, Model

REQUEST_MAX = 32 * 1024 * 1024
RESPONSE_MAX = 64 * 1024 * 1024
"""Bytes of one body. A longer request is refused with 413, a longer answer breaks off."""
HEAD_MAX = 64 * 1024
_READ = 128 * 1024
FLUSH_BOUND_S = 3.0
READ_AFTER_S = 0.05
"""A request is parsed for its event so long after it was sent: not while others wait to be sent, nor when answers come."""
_OWN = INVOCATION_HEADER.encode()
_DROPPED = frozenset((b"host", b"content-length", b"accept-encoding", b"cookie", b"expect", _OWN))
_JSON = (b"content-type", b"application/json")


class _ClientGone(Exception):
    pass


class Gateway:
    """Serves one session. `upstream` is where calls go."""

    def __init__(self, model: Model, upstream: Upstream, events: EventPipe, *, max_calls: int | None) -> None:
        self._timeout_s = model.timeout_s
        self._base = urlsplit(model.url).path.rstrip("/")
        self._upstream = upstream
        self._direct = model.upstream != "relay"
        self._calls = Calls(events, max_calls=max_calls, max_retries=model.max_retries)
        self._connections: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> asyncio.Server:
        """Start to accept."""
        return await asyncio.get_running_loop().create_server(lambda: _Protocol(self._accept), sock=listener)

    async def end(self) -> None:
        """Break off what still runs, each call with its account."""
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, protocol: _Protocol) -> None:
        task = asyncio.ensure_future(_Connection(self, reader, writer, protocol).run())
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def answer(self, request: h11.Request, body: bytes, client: _Connection) -> None:
        """Answer one request of a client."""
        method, target = request.method.decode("ascii"), request.target.decode("latin-1")
        path = target.partition("?")[0]
        if path.startswith(TOOLS_PATH) and method == "POST":
            tool = TOOL + unquote(path.removeprefix(TOOLS_PATH))
            await self._call_tool(Ask(method=method, path=path, dialect=tool, headers=[_JSON], body=body), client)
            return
        dialect = dialect_of(method, path, self._base)
        if dialect is None:
            known = ", ".join(f"{'GET' if name == 'models' else 'POST'} …/v1{suffix}" for name, suffix in PATHS.items())
            raise Refusal(404, "not_found", f"the gateway has no {method} {path}, it has {known}")
        headers = [(name, value) for name, value in end_to_end(request.headers) if name not in _DROPPED]
        headers.append((b"accept-encoding", b"identity"))  # else the account would have to know each compression
        sent = without_cache_control(body) if dialect in {"chat", "responses"} else body
        ask = Ask(method=method, path=target, dialect=dialect, headers=headers, body=sent)
        account = self._calls.begin(ask, invocation=_header(request.headers, _OWN))
        reading = asyncio.get_running_loop().call_later(READ_AFTER_S, account.read_request)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._forward(ask, account, client)
        except TimeoutError:
            account.fail("timeout", f"the model did not answer within {self._timeout_s:g} s")
        except UpstreamError as error:
            account.fail(error.kind, str(error))
        except _ClientGone:
            account.fail("client_gone", "the agent left before the answer was complete")
        except asyncio.CancelledError:
            account.fail("client_gone" if client.gone else "session_ended", "the call was broken off")
            raise
        finally:
            reading.cancel()
            self._calls.end(account)
        if account.error in KINDS:
            if client.answered:
                raise _ClientGone  # a head is out: all that is left is to break off as the model did
            raise Refusal(KINDS[account.error], f"model_{account.error}", account.detail)

    async def _call_tool(self, ask: Ask, client: _Connection) -> None:
        """Have the controller call a granted function. The driver tells of it; here it is no model call."""
        if self._direct:
            raise Refusal(404, "not_found", "functions of other servers are called directly in this session")
        try:
            async with self._upstream.send(ask) as reply:
                client.head(reply.status, reply.headers)
                async for chunk in reply.chunks:
                    await client.send(h11.Data(data=chunk))
                await client.send(h11.EndOfMessage())
        except UpstreamError as error:
            if client.answered:
                raise _ClientGone from error
            raise Refusal(KINDS[error.kind], TOOL_FAILED, str(error)) from error

    async def _forward(self, ask: Ask, account: Account, client: _Connection) -> None:
        async with self._upstream.send(ask) as reply:
            kind, coding = (_header(reply.headers, name) for name in (b"content-type", b"content-encoding"))
            answer = Answer(ask.dialect, kind, coding)
            account.head(reply.status, answer)
            client.head(reply.status, [*reply.headers, (CALL_HEADER.encode(), b"%d" % account.seq)])
            if answer.streaming:
                await client.send()
            held = b""  # the last bytes of a plain answer: its event is written before the agent can act on it
            async for chunk in reply.chunks:
                account.body(chunk)
                if account.response_bytes > RESPONSE_MAX:
                    raise UpstreamError("cut", f"the model's answer has more than {RESPONSE_MAX} bytes")
                ready, held = (chunk, b"") if answer.streaming else (held, chunk)
                if ready:
                    await client.send(h11.Data(data=ready))
            account.complete()
            self._calls.end(account)
            await client.send(*([h11.Data(data=held)] if held else []), h11.EndOfMessage())


class _Protocol(asyncio.StreamReaderProtocol):
    """A client's stream that tells at once when the client leaves, also while nobody reads."""

    def __init__(self, accept: Callable[[asyncio.StreamReader, asyncio.StreamWriter, _Protocol], None]) -> None:
        self.on_leave: Callable[[], None] | None = None
        super().__init__(asyncio.StreamReader(limit=2 * _READ), lambda reader, writer: accept(reader, writer, self))

    def eof_received(self) -> bool | None:
        """Nothing more comes from the client."""
        self._leave()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more reaches the client."""
        self._leave()
        super().connection_lost(exc)

    def _leave(self) -> None:
        if self.on_leave is not None:
            self.on_leave()


class _Connection:
    """One client's connection: requests one after the other."""

    def __init__(
        self, gateway: Gateway, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, protocol: _Protocol
    ) -> None:
        self._gateway = gateway
        self._reader, self._writer, self._protocol = reader, writer, protocol
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_MAX)
        self._held: list[h11.Event] = []
        self.answered = False
        self.gone = False

    async def run(self) -> None:
        """Answer until the client leaves or breaks the protocol."""
        try:
            while await self._one():
                self._http.start_next_cycle()
                self.answered = False
        except (_ClientGone, OSError):
            self._writer.transport.abort()
        except Exception:  # noqa: BLE001
            # Broad on purpose: what goes wrong with one client is not the others' affair; supervisor.log gets the traceback.
            sys.excepthook(*sys.exc_info())
            self._writer.transport.abort()
        finally:
            self._writer.close()

    async def _one(self) -> bool:
        request: h11.Request | None = None
        try:
            request = await self._request()
            if request is None:
                return False
            body = await self._body()
            await self._until_gone(request, body)
        except h11.RemoteProtocolError as error:
            await self._refuse(Refusal(error.error_status_hint, "bad_request", str(error)))
        except Refusal as refusal:
            await self._refuse(refusal)
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    async def _request(self) -> h11.Request | None:
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Request):
                return event
            if event is not h11.NEED_DATA:
                return None
            self._http.receive_data(await self._reader.read(_READ))

    async def _body(self) -> bytes:
        body = bytearray()
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Data):
                body += event.data
                if len(body) > REQUEST_MAX:
                    raise Refusal(413, "request_too_large", f"the request has more than {REQUEST_MAX} bytes")
            elif isinstance(event, h11.EndOfMessage):
                return bytes(body)
            elif event is h11.NEED_DATA:
                if self._http.they_are_waiting_for_100_continue:
                    await self.send(h11.InformationalResponse(status_code=100, headers=[]))
                self._http.receive_data(await self._reader.read(_READ))
            else:
                raise _ClientGone

    async def _until_gone(self, request: h11.Request, body: bytes) -> None:
        """Answer, but not for a client that has left."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 (run() is one)

        def leave() -> None:
            if not self.gone:
                self.gone = True
                task.cancel()

        self._protocol.on_leave = leave
        try:
            await self._gateway.answer(request, body, self)
        except asyncio.CancelledError:
            if not self.gone:
                raise
            task.uncancel()
            raise _ClientGone from None
        finally:
            self._protocol.on_leave = None

    def head(self, status: int, headers: Headers) -> None:
        """Begin the answer; it goes out with the next write, and until then another may take its place."""
        self._held = [h11.Response(status_code=status, headers=headers)]

    async def send(self, *events: h11.Event) -> None:
        """Write what was held and these parts of the answer, at once."""
        parts, self._held = [*self._held, *events], []
        self.answered = self.answered or isinstance(parts[0], h11.Response)
        await self._write(b"".join(self._http.send(part) or b"" for part in parts))

    async def _write(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise _ClientGone from error

    async def _refuse(self, refusal: Refusal) -> None:
        if self._http.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            raise _ClientGone
        error = {"message": f"boxstrap gateway: {refusal}", "type": refusal.code, "code": refusal.code, "param": None}
        raw = json.dumps({"error": error}).encode()
        headers: Headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(raw))]
        if refusal.code in {BUDGET_CODE, GIVEN_UP_CODE}:
            headers.append((b"x-should-retry", b"false"))  # OpenAI's and Anthropic's clients obey it
        if self._http.their_state is h11.SEND_BODY:
            headers.append((b"connection", b"close"))
        self.head(refusal.status, headers)
        await self.send(h11.Data(data=raw), h11.EndOfMessage())


def _header(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> str:
    return next((value.decode("latin-1") for name, value in headers if name == wanted), "")


async def _run(config: dict[str, object]) -> None:
    model = Model(**config["model"])  # type: ignore[arg-type] # our own supervisor wrote it
    events = await EventPipe.open(int(str(config["events"])))
    limit = config["max_policy_calls"]
    upstream: Upstream
    if model.upstream == "relay":
        upstream = relay = Relay(SessionPaths(str(config["session"])))
        controllers = await relay.listen()
    else:
        upstream, controllers = Direct(model), None
    gateway = Gateway(model, upstream, events, max_calls=None if limit is None else int(str(limit)))
    listener = socket.socket(fileno=int(str(config["listener"])))
    listener.setblocking(False)
    server = await gateway.serve(listener)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, ended.set)  # nothing more is ever written: readable is the end
    await ended.wait()
    server.close()
    if controllers is not None:
        controllers.close()
    await gateway.end()
    await events.close(FLUSH_BOUND_S)


def main() -> NoReturn:
    """Serve until standard input ends: its first line is the configuration, and the supervisor holds the other end."""
    asyncio.run(_run(json.loads(_first_line())))
    os._exit(0)  # a resolver's thread may hang


def _first_line() -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return bytes(line)
