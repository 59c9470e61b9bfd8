# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""One held `tail --follow` in place of a new exec for every reply, where the sandbox can hand over output as it comes.

It only makes things fast. Whatever breaks it, the next reply is asked for by offset, so it refuses to be anything to rely on.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable

from boxstrap.controller.errors import BoxstrapError
from boxstrap.controller.sandbox import Conversing

FOLLOW_S = 600.0
"""After this a follower ends by itself, so that one whose controller was killed does not stay for long."""
MARGIN_S = 30.0
WAITING_MAX = 8 * 1024 * 1024
"""Bytes of replies that may wait to be taken; a box that sends more is asked by offset again."""
REST_S = 5.0
"""How long plain replies do before a broken follower is started again."""


class Follower:
    """The lines of one held command, started anew when it ended."""

    def __init__(self, sandbox: Conversing, command: Callable[[], str], *, user: str | int | None) -> None:
        self._sandbox = sandbox
        self._command = command
        self._user = user
        self._running: asyncio.Task[None] | None = None
        self._lines: collections.deque[bytes] = collections.deque()
        self._rest = bytearray()
        self._waiting = 0
        self._more = asyncio.Event()
        self._rests_until = 0.0

    async def line(self, *, within_s: float) -> str | None:
        """Return the next line, or None when the follower gave none: then ask in the plain way, and come again."""
        if not self._lines and not self._start():
            return None
        assert self._running is not None  # noqa: S101 (started above)
        if not self._lines:
            more = asyncio.ensure_future(self._more.wait())
            await asyncio.wait({more, self._running}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            more.cancel()
        if not self._lines:
            await self.close()
            self._rests_until = time.monotonic() + REST_S
            return None
        line = self._lines.popleft()
        self._waiting -= len(line) + 1
        if not self._lines:
            self._more.clear()
        return line.decode("utf-8", "replace")

    async def close(self) -> None:
        """End the held command and forget what it said: it is there by offset."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        self._running = None
        self._lines.clear()
        self._rest.clear()
        self._waiting = 0
        self._more.clear()

    def _start(self) -> bool:
        if self._running is not None:
            return True
        if time.monotonic() < self._rests_until:
            return False
        self._running = asyncio.ensure_future(self._hold())
        return True

    async def _hold(self) -> None:
        """Take what one held command prints, to its end."""
        async with asyncio.timeout(FOLLOW_S + MARGIN_S), self._sandbox.converse(self._command(), user=self._user) as held:
            while chunk := await held.receive():
                self._take(chunk)

    def _take(self, chunk: bytes) -> None:
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            self._lines.append(bytes(self._rest) + line)
            self._rest.clear()
        self._rest += rest
        self._waiting += len(chunk)
        if self._waiting > WAITING_MAX:
            raise BoxstrapError("The box sends more than is taken.", remedy="It is asked by offset.")
        if lines:
            self._more.set()
