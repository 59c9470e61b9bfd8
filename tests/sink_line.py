# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The line between a box and a sink, and scissors: a listener before the sink's own that can be cut, or lose its answers.

It lives in the event loop of the test. It refuses to understand what it carries.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from boxstrap.controller.listening import listening
from boxstrap.controller.sink import Sink


class SinkLine:
    """`line.cut()` breaks what is open and refuses what comes; `line.lose(n)` breaks off at each of the next n answers."""

    def __init__(self) -> None:
        self.is_cut = False
        self.losing = 0
        self.lost = 0
        self.carried = 0
        self._open: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Break every connection, and refuse new ones until `mend`."""
        self.is_cut = True
        for one in self._open:
            one.transport.abort()

    def mend(self) -> None:
        """Let connections through again."""
        self.is_cut = False

    def lose(self, answers: int) -> None:
        """Let the sink answer so many batches, and nobody hear it."""
        self.losing += answers

    @asynccontextmanager
    async def before(self, host: str, target: Sink) -> AsyncIterator[Sink]:
        """Give the sink under the line's own address."""
        port = int(target.url.rpartition(":")[2])

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self.is_cut:
                writer.transport.abort()
                return
            far_reader, far_writer = await asyncio.open_connection(host, port)
            self._open |= {writer, far_writer}
            try:
                await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer, answers=True))
            finally:
                self._open -= {writer, far_writer}
                for one in (writer, far_writer):
                    one.transport.abort()

        server = await asyncio.start_server(accept, host, 0)
        own, target.url = target.url, f"http://{host}:{server.sockets[0].getsockname()[1]}"
        try:
            yield target
        finally:
            target.url = own
            server.close()
            self.cut()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if answers:
                    self.carried += 1
                    if self.losing:
                        self.losing -= 1
                        self.lost += 1
                        break
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@asynccontextmanager
async def cut_sink(host: str = "127.0.0.1") -> AsyncIterator[tuple[Sink, SinkLine]]:
    """Serve a sink behind a line."""
    line = SinkLine()
    async with listening(f"http://{host}:0") as sink, line.before(host, sink):
        yield sink, line
