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
from typing import Protocol, runtime_checkable

from boxstrap.controller.errors import BoxstrapError

FOLLOW_S = 600.0
"""After this a follower ends by itself, so that one whose controller was killed does not stay for long."""
MARGIN_S = 30.0
WAITING_MAX = 8 * 1024 * 1024
"""Bytes of replies that may wait to be taken; a box that sends more is asked by offset again."""
REST_S = 5.0
"""How long plain replies do before a broken follower is started again."""


@runtime_checkable
class Streaming(Protocol):
    """A sandbox that hands over a command's stdout while it runs."""

    async def stream(
        self, command: str, on_output: Callable[[bytes], None], *, user: str | int | None = None, timeout_s: float | None = None
    ) -> int:
        """Run a command to its end and return its exit status; what `on_output` raises ends it.

        Raises:
            SandboxLost: the sandbox is gone.
            TimeoutError: it took longer.
            OSError: it could not be started.
        """


class Follower:
    """The lines of one held command, started anew when it ended."""

    def __init__(self, sandbox: Streaming, command: Callable[[], str], *, user: str | int | None) -> None:
        self._sandbox = sandbox
        self._command = command
        self._user = user
        self._running: asyncio.Task[int] | None = None
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
        waits = {asyncio.ensure_future(self._more.wait()), self._running}
        if not self._lines:
            await asyncio.wait(waits, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits - {self._running}:
            wait.cancel()
        if not self._lines:
            await self.close()
            self._rests_until = time.monotonic() + REST_S
            return None
        line = self._lines.popleft()
        self._waiting -= len(line)
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
        call = self._sandbox.stream(self._command(), self._take, user=self._user, timeout_s=FOLLOW_S + MARGIN_S)
        self._running = asyncio.ensure_future(call)
        return True

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
