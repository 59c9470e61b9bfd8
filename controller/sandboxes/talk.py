# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Both ends of a running command's standard streams, for the adapters whose sandbox can hold an exec open.

It refuses to grow with what the sandbox prints: what nobody receives in time ends the conversation.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable

from boxstrap.controller.errors import EvidenceError

WAITING_MAX = 64 * 1024 * 1024
"""Bytes that may wait to be received."""


class Talk:
    """One conversation. Implements `boxstrap.controller.sandbox.Conversation`."""

    def __init__(self) -> None:
        self._chunks: collections.deque[bytes] = collections.deque()
        self._waiting = 0
        self._some = asyncio.Event()
        self._ended = False
        self.sender: Callable[[bytes], Awaitable[None]] | None = None

    def feed(self, chunk: bytes) -> None:
        """Take what the command printed.

        Raises:
            EvidenceError: too much waits already.
        """
        self._waiting += len(chunk)
        if self._waiting > WAITING_MAX:
            raise EvidenceError(f"The sandbox sent more than {WAITING_MAX} bytes that nobody asked for.")
        self._chunks.append(chunk)
        self._some.set()

    def end(self) -> None:
        """Note that the command has ended."""
        self._ended = True
        self._some.set()

    async def receive(self) -> bytes:
        """Give what the command printed next; nothing at its end."""
        while not self._chunks and not self._ended:
            self._some.clear()
            await self._some.wait()
        if not self._chunks:
            return b""
        chunk = self._chunks.popleft()
        self._waiting -= len(chunk)
        return chunk

    async def send(self, data: bytes) -> None:
        """Write to the command's standard input.

        Raises:
            OSError: nobody reads it any more.
        """
        if self.sender is None or self._ended:
            raise BrokenPipeError("the command has ended")
        await self.sender(data)
