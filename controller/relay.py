# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The host's side of relayed calls: takes them out of the box, makes them with the host's URLs and keys, answers.

What comes out of the box is hostile input. It chooses a path suffix out of four or a function that it was granted, a few
harmless headers, and the body; the host, the port, the path prefix, the method and the credentials are the controller's. It
refuses more calls at once, more bytes and more policy calls than it was told, and it never retries.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import secrets
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from boxstrap.controller import push
from boxstrap.controller.errors import BoxstrapError, EvidenceError, SandboxLost
from boxstrap.controller.sandbox import Conversation, Conversing, Sandbox
from boxstrap.controller.tool_jars import ToolJars, ToolServer
from boxstrap.runner.frames import PASSED_ON, PATHS, Frame, PolicyBudget, Type, Unpacker, pieces
from boxstrap.runner.layout import SessionPaths
from boxstrap.runner.wire import Model

REQUEST_MAX = 32 * 1024 * 1024
RESPONSE_MAX = 64 * 1024 * 1024
CALLS_MAX = 64
"""Calls of one session in flight; more fail at once."""
HELD_MAX = 128 * 1024 * 1024
"""Bytes of requests that one session may have in flight."""
CONNECT_MAX_S = 30.0
TOOL_TIMEOUT_S = 600.0
POLL_WAIT_S = 8.0
POLL_MARGIN_S = 30.0
ARGV_MAX = 60 * 1024
"""Bytes of answers that travel in a command; Linux takes 128 KiB in one argument, and base64 adds a third."""
BATCH_MAX = 4 * 1024 * 1024
AGAIN_S = (0.1, 0.5, 2.0)
_DROPPED = {"set-cookie", "connection", "keep-alive", "transfer-encoding", "upgrade", "trailer", "content-encoding"}


@dataclass
class _Asked:
    dialect: str
    headers: dict[str, str]
    size: int
    body: bytearray = field(default_factory=bytearray)


class Caller:
    """Makes calls. `answer` takes the frames that go back."""

    def __init__(self, model: Model, *, max_calls: int | None, tools: ToolJars | None = None) -> None:
        self._model = model
        self._tools = tools
        self._base = model.url.rstrip("/")
        self._budget = PolicyBudget(max_calls)
        self._asked: dict[int, _Asked] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._held = 0
        self.answer: Callable[[Frame], None] = lambda frame: None
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(model.timeout_s, connect=min(CONNECT_MAX_S, model.timeout_s)),
            limits=httpx.Limits(max_connections=CALLS_MAX, max_keepalive_connections=CALLS_MAX, keepalive_expiry=4.0),
            follow_redirects=False,
        )
        self._tools_http = httpx.AsyncClient(timeout=httpx.Timeout(TOOL_TIMEOUT_S, connect=CONNECT_MAX_S))

    def take(self, frame: Frame) -> None:
        """Take one frame out of the box; what makes no sense there fails that call alone."""
        if frame.type is Type.REQUEST:
            self._begin(frame)
        elif frame.type is Type.BODY and frame.call in self._asked:
            asked = self._asked[frame.call]
            asked.body += frame.payload
            self._go(frame.call, asked)
        elif frame.type is Type.CANCEL:
            self._forget(frame.call)
            if task := self._running.get(frame.call):
                task.cancel()

    def drop(self) -> None:
        """Break off everything: the box has forgotten these calls."""
        self._asked.clear()
        self._held = 0
        for task in self._running.values():
            task.cancel()

    async def aclose(self) -> None:
        """Break off, and close the connections."""
        self.drop()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._http.aclose()
        await self._tools_http.aclose()

    def _begin(self, frame: Frame) -> None:
        try:
            said = frame.said()
            dialect, size, pairs = str(said["dialect"]), int(str(said["bytes"])), said["headers"]
            headers = {str(name): str(value) for name, value in pairs} if isinstance(pairs, list) else {}
        except (ValueError, KeyError, TypeError):
            self._fail(frame.call, "cut", "the request's head cannot be read")
            return
        granted = self._tools is not None and self._tools.server_of(dialect) is not None
        if not (dialect in PATHS or granted) or frame.call in self._asked or frame.call in self._running:
            self._fail(frame.call, "cut", f"found dialect {dialect[:40]!r}, needed a new call of {', '.join(PATHS)}")
            return
        if not 0 <= size <= REQUEST_MAX or self._held + size > HELD_MAX or len(self._asked) + len(self._running) >= CALLS_MAX:
            self._fail(frame.call, "cut", "found more calls or bytes at once than the controller relays")
            return
        self._held += size
        asked = self._asked[frame.call] = _Asked(dialect, {n: v for n, v in headers.items() if n in PASSED_ON}, size)
        self._go(frame.call, asked)

    def _go(self, number: int, asked: _Asked) -> None:
        if len(asked.body) < asked.size:
            return
        self._forget(number)
        if len(asked.body) > asked.size:
            self._fail(number, "cut", "found more body than the head said")
            return
        server = self._tools.server_of(asked.dialect) if self._tools is not None else None
        call = self._call(number, asked) if server is None else self._call_tool(number, asked, server)
        task = asyncio.ensure_future(call)
        self._running[number] = task
        task.add_done_callback(lambda _: self._running.pop(number, None))

    def _forget(self, number: int) -> None:
        asked = self._asked.pop(number, None)
        self._held -= asked.size if asked is not None else 0

    def _fail(self, number: int, kind: str, detail: str) -> None:
        self.answer(Frame.of(Type.FAIL, number, {"kind": kind, "detail": detail}))

    async def _call(self, number: int, asked: _Asked) -> None:
        method = "GET" if asked.dialect == "models" else "POST"
        body = bytes(asked.body)
        key = f"{asked.dialect} {hashlib.sha256(body).hexdigest()}"
        taken = (0, 0) if method == "GET" else self._budget.take(key)
        if taken is None:
            self._fail(number, "cut", f"max_policy_calls is {self._budget.limit}, all are used")
            return
        headers = {"accept-encoding": "identity", **asked.headers, **{n.lower(): v for n, v in self._model.headers.items()}}
        good = False
        try:
            async with asyncio.timeout(self._model.timeout_s):
                ask = self._http.build_request(method, self._base + PATHS[asked.dialect], content=body, headers=headers)
                good = await self._forward(number, await self._http.send(ask, stream=True))
        except TimeoutError:
            self._fail(number, "timeout", f"the model did not answer within {self._model.timeout_s:g} s")
        except httpx.TimeoutException as error:
            self._fail(number, "timeout", f"{type(error).__name__}: the model did not answer in time")
        except (httpx.ConnectError, httpx.UnsupportedProtocol) as error:
            self._fail(number, "unreachable", f"no connection to the model: {type(error).__name__}")
        except (httpx.HTTPError, httpx.InvalidURL, EvidenceError) as error:
            self._fail(number, "cut", f"the model's answer broke off: {type(error).__name__}")
        finally:
            if not good and method == "POST":
                self._budget.failed(key, taken[0], taken[1] + 1)

    async def _call_tool(self, number: int, asked: _Asked, server: ToolServer) -> None:
        """Call a granted function: URL, headers and cookies are the host's; the box chose its name and the arguments."""
        try:
            async with server.lock:
                ask = self._tools_http.build_request("POST", server.url, content=bytes(asked.body), headers=server.headers())
                response = await self._tools_http.send(ask, stream=True)
                self._tools_http.cookies.clear()  # each server's jar is its own
                server.keep(response.headers.get_list("set-cookie"))
                await self._forward(number, response)
        except httpx.HTTPError as error:
            kind = "unreachable" if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) else "cut"
            self._fail(number, kind, f"{server.access.name}: {type(error).__name__}")
        except EvidenceError as error:
            self._fail(number, "cut", f"{server.access.name}: {error}")

    async def _forward(self, number: int, response: httpx.Response) -> bool:
        try:
            headers = {name: value for name, value in response.headers.items() if name not in _DROPPED}
            self.answer(Frame.of(Type.HEAD, number, {"status": response.status_code, "headers": headers}))
            size = 0
            async for chunk in response.aiter_raw():
                size += len(chunk)
                if size > RESPONSE_MAX:
                    raise EvidenceError(f"The model answered with more than {RESPONSE_MAX} bytes.")
                for piece in pieces(chunk):
                    self.answer(Frame(Type.DATA, number, piece))
            self.answer(Frame(Type.END, number))
            return response.is_success
        finally:
            await response.aclose()


class ModelRelay:
    """Relays one session's model calls for as long as `run` runs."""

    def __init__(
        self,
        sandbox: Sandbox,
        session: SessionPaths,
        archive: str,
        model: Model,
        *,
        max_calls: int | None = None,
        tools: ToolJars | None = None,
        user: str | int | None = None,
    ) -> None:
        self._sandbox, self._session, self._user = sandbox, session, user
        self._verb = ["sh", archive, "relay", "--session", session.path, "--controller", secrets.token_hex(8)]
        self._caller = Caller(model, max_calls=max_calls, tools=tools)

    async def run(self) -> None:
        """Relay until cancelled. A channel that breaks is opened again: the agent's calls wait for it for a while."""
        sandbox = self._sandbox
        failures = 0
        try:
            while True:
                try:
                    if isinstance(sandbox, Conversing):
                        async with sandbox.converse(shlex.join(self._verb), user=self._user) as conversation:
                            await self._hold(conversation)
                    else:
                        await _Polling(self._sandbox, self._session, self._verb, self._caller, self._user).run()
                    failures = 0
                except (BoxstrapError, OSError, ValueError):
                    failures += 1  # what is wrong with the sandbox is for the session's own calls to find out
                finally:
                    self._caller.drop()
                await asyncio.sleep(AGAIN_S[min(failures, len(AGAIN_S) - 1)])
        finally:
            await self._caller.aclose()

    async def _hold(self, conversation: Conversation) -> None:
        frames: asyncio.Queue[bytes] = asyncio.Queue()
        self._caller.answer = lambda frame: frames.put_nowait(frame.packed())

        async def speak() -> None:
            while True:
                await conversation.send(await frames.get())

        speaking = asyncio.ensure_future(speak())
        unpacker = Unpacker()
        try:
            while data := await conversation.receive():
                for frame in unpacker.feed(data):
                    self._caller.take(frame)
        finally:
            speaking.cancel()
            await asyncio.gather(speaking, return_exceptions=True)


class _Polling:
    """The channel for a sandbox that can do no more than run a command to its end.

    One exec waits for calls, and other execs bring answers, in batches, one after the other. Frames are numbered, so that a
    reply that is lost is asked for again and one that comes twice is dropped.
    """

    def __init__(
        self, sandbox: Sandbox, session: SessionPaths, verb: list[str], caller: Caller, user: str | int | None
    ) -> None:
        self._sandbox, self._session, self._caller, self._user = sandbox, session, caller, user
        self._verb = [*verb, "--poll", "--json"]
        self._seen = 0
        self._batch = 0
        self._waiting = bytearray()
        self._some = asyncio.Event()
        caller.answer = self._answer

    async def run(self) -> None:
        """Poll and bring until one of both fails."""
        tasks = [asyncio.ensure_future(self._ask()), asyncio.ensure_future(self._bring())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _answer(self, frame: Frame) -> None:
        self._waiting += frame.packed()
        self._some.set()

    async def _ask(self) -> None:
        while True:
            await self._exchange(wait_s=POLL_WAIT_S)

    async def _bring(self) -> None:
        while True:
            await self._some.wait()
            batch = bytes(self._waiting[:BATCH_MAX])  # a frame may be cut: the gateway puts batches together
            del self._waiting[:BATCH_MAX]
            if not self._waiting:
                self._some.clear()
            self._batch += 1
            await self._exchange(wait_s=0.0, answers=await self._packed(batch), batch=self._batch)

    async def _packed(self, batch: bytes) -> str:
        if len(batch) <= ARGV_MAX:
            return base64.b64encode(batch).decode("ascii")
        remote = f"{self._session.tmp}/relay-{self._batch}"
        with tempfile.NamedTemporaryFile(prefix="boxstrap-relay-") as file:
            file.write(batch)
            file.flush()
            await push.foreign(self._sandbox.upload(Path(file.name), remote))
        return f"@{remote}"

    async def _exchange(self, *, wait_s: float, answers: str = "", batch: int = 0) -> None:
        words = [*self._verb, "--ack", str(self._seen), "--wait", str(wait_s)]
        if batch:
            words += ["--batch", str(batch), "--answers", answers]
        for last in (False, True):
            try:
                done = await push.run(self._sandbox, shlex.join(words), user=self._user, timeout_s=wait_s + POLL_MARGIN_S)
                break
            except SandboxLost:
                if last or answers.startswith("@"):
                    raise
        answer = push.answer_of(done, "relay")
        if answer.data is None:
            raise SandboxLost("The relay found no gateway in the box.", code="relay-closed")
        try:
            first, data = int(str(answer.data["first"])), base64.b64decode(str(answer.data["data"]), validate=True)
            frames = list(Unpacker().feed(data))
        except (ValueError, KeyError, binascii.Error, json.JSONDecodeError) as error:
            raise EvidenceError("The box answered `relay` with something else.") from error
        for number, frame in enumerate(frames, start=first):
            if number > self._seen:
                self._seen = number
                self._caller.take(frame)
