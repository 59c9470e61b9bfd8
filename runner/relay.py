# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The gateway's way to a model that only the controller can reach: frames over a socket in the session's folder.

The controller comes through an exec, either held open (`hold`) or again and again (`poll`). A call that it has not taken waits
for a while. A call that a lost controller had taken has failed: it may have been sent. It refuses to hand a call out twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from boxstrap.runner.frames import FRAME_MAX, PASSED_ON, Frame, Type, Unpacker, pieces
from boxstrap.runner.layout import SessionPaths
from boxstrap.runner.upstream import KINDS, Ask, Headers, Reply, UpstreamError

WAIT_S = 60.0
"""How long a call waits for a controller to take it."""
POLL_LOST_S = 20.0
"""After so many seconds without a poll, a controller that polls is lost."""
HELLO_MAX = 4096
POLL_BYTES_MAX = 4 * 1024 * 1024
_LOST = {"kind": "relay_lost", "detail": "the controller that was making this call is gone"}


@dataclass
class _Call:
    number: int
    frames: list[Frame]
    answer: asyncio.Queue[Frame] = field(default_factory=asyncio.Queue)
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    taker: str = ""


class Relay:
    """An upstream behind the controller."""

    def __init__(self, session: SessionPaths) -> None:
        self._path = session.relay
        self._calls: dict[int, _Call] = {}
        self._numbers = 0
        self._taker = ""
        self._seen_at = 0.0
        self._holder: asyncio.StreamWriter | None = None
        self._outbox: list[tuple[int, bytes]] = []
        self._written = 0
        self._batch = 0
        self._brought = Unpacker()
        self._more = asyncio.Event()

    async def listen(self) -> asyncio.Server:
        """Open the socket. Its path may be longer than the 108 bytes that an address has: it is reached by its folder."""
        folder = os.open(os.path.dirname(self._path), os.O_PATH | os.O_DIRECTORY)
        listener = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        listener.bind(f"/proc/self/fd/{folder}/{os.path.basename(self._path)}")
        os.close(folder)
        return await asyncio.start_unix_server(self._accept, sock=listener, limit=HELLO_MAX)

    @contextlib.asynccontextmanager
    async def send(self, ask: Ask) -> AsyncIterator[Reply]:
        """Have the controller make one call.

        Raises:
            UpstreamError: no controller came, it went away, or the model failed.
        """
        self._numbers += 1
        headers = [[name.decode(), value.decode("latin-1")] for name, value in ask.headers if name.decode() in PASSED_ON]
        head = {"dialect": ask.dialect, "headers": headers, "bytes": len(ask.body)}
        frames = [Frame.of(Type.REQUEST, self._numbers, head)]
        frames += [Frame(Type.BODY, self._numbers, piece) for piece in pieces(ask.body)]
        call = self._calls[self._numbers] = _Call(self._numbers, frames)
        ended = False
        try:
            self._give_out()
            try:
                await asyncio.wait_for(call.taken.wait(), WAIT_S)
            except TimeoutError as error:
                raise UpstreamError("relay_lost", f"no controller took the call within {WAIT_S:g} s") from error
            status, answered = _head_of(await self._next(call))
            yield Reply(status, answered, self._body(call))
            ended = True
        finally:
            del self._calls[call.number]
            if call.taker and not ended:
                self._tell(Frame(Type.CANCEL, call.number))

    async def _next(self, call: _Call) -> Frame:
        while True:
            try:
                frame = await asyncio.wait_for(call.answer.get(), POLL_LOST_S)
            except TimeoutError:
                if self._holder is None and time.monotonic() - self._seen_at > POLL_LOST_S:
                    self._lose(call.taker)
                continue
            if frame.type is Type.FAIL:
                said = frame.said()
                kind = str(said.get("kind"))
                raise UpstreamError(kind if kind in KINDS else "cut", str(said.get("detail"))[:4096])
            return frame

    async def _body(self, call: _Call) -> AsyncIterator[bytes]:
        while (frame := await self._next(call)).type is not Type.END:
            if frame.payload:
                yield frame.payload

    def _give_out(self) -> None:
        """Hand what nobody has taken to the controller that is there."""
        if not self._taker:
            return
        for call in self._calls.values():
            if not call.taker:
                call.taker = self._taker
                for frame in call.frames:
                    self._tell(frame)
                call.frames = []
                call.taken.set()

    def _tell(self, frame: Frame) -> None:
        if self._holder is not None:
            self._holder.write(frame.packed())
        elif self._taker:
            self._written += 1
            self._outbox.append((self._written, frame.packed()))
            self._more.set()

    def _lose(self, taker: str) -> None:
        """Fail what that controller had taken; what it had not, waits for the next."""
        if taker == self._taker:
            self._taker = ""
            self._holder = None
            self._outbox.clear()
        for call in self._calls.values():
            if call.taker == taker:
                call.answer.put_nowait(Frame.of(Type.FAIL, call.number, _LOST))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = json.loads(await reader.readline())
            controller = str(hello["controller"])
            if hello["mode"] == "hold":
                await self._hold(controller, reader, writer)
            else:
                await self._poll(controller, hello, reader, writer)
        except (OSError, ValueError, KeyError, TypeError, asyncio.IncompleteReadError):
            pass  # whoever that was, it speaks something else, or left
        finally:
            writer.close()

    async def _hold(self, controller: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._taker:
            self._lose(self._taker)
        taker = f"{controller} {id(writer)}"  # a second connection of one controller is another taker
        self._taker, self._holder = taker, writer
        self._give_out()
        unpacker = Unpacker()
        try:
            while data := await reader.read(FRAME_MAX):
                for frame in unpacker.feed(data):
                    self._answer(frame)
        finally:
            self._lose(taker)

    async def _poll(
        self, controller: str, hello: dict[str, object], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Take the answers that a poll brings, each batch once; wait for something to say; say all that is not acknowledged."""
        if self._taker != controller:
            if self._taker:
                self._lose(self._taker)
            self._taker, self._batch, self._brought = controller, 0, Unpacker()
        self._seen_at = time.monotonic()
        batch, size = int(str(hello["batch"])), int(str(hello["bytes"]))
        brought = await reader.readexactly(size)
        if batch > self._batch:
            self._batch = batch
            for frame in self._brought.feed(brought):
                self._answer(frame)
        acknowledged = int(str(hello["ack"]))
        self._outbox = [(number, packed) for number, packed in self._outbox if number > acknowledged]
        self._give_out()
        until = time.monotonic() + min(float(str(hello["wait"])), POLL_LOST_S / 2)
        while not self._outbox and (left := until - time.monotonic()) > 0:
            self._more.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._more.wait(), left)
        self._seen_at = time.monotonic()
        said, size = [], 0
        for _, packed in self._outbox:
            said.append(packed)
            size += len(packed)
            if size > POLL_BYTES_MAX:
                break
        first = self._outbox[0][0] if self._outbox else self._written + 1
        writer.write(json.dumps({"first": first, "frames": len(said)}).encode() + b"\n" + b"".join(said))
        await writer.drain()

    def _answer(self, frame: Frame) -> None:
        call = self._calls.get(frame.call)
        if call is not None and frame.type in {Type.HEAD, Type.DATA, Type.END, Type.FAIL}:
            call.answer.put_nowait(frame)


def _head_of(frame: Frame) -> tuple[int, Headers]:
    try:
        said = frame.said()
        status, named = int(str(said["status"])), said["headers"]
        pairs = named.items() if isinstance(named, dict) else ()
        headers = [(str(name).lower().encode("latin-1"), str(value).encode("latin-1")) for name, value in pairs]
    except (ValueError, KeyError) as error:
        raise UpstreamError("cut", f"the controller answered with something else: {error}") from error
    return status, headers
