# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What one session pushes, as its consumer takes it: one batch at a time, acknowledged when it was taken.

It only makes things fast, like follower.py: a consumer that finds it silent asks by offset. It refuses a second batch while one
waits, so that a box that sends faster than is taken has to hold what it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from boxstrap.runner.wire import PUSH_BEAT_S, Acknowledged

SILENCE_S = 2.5 * PUSH_BEAT_S
"""A box that has said nothing for so long counts as gone: its evidence is asked for."""
HOLD_S = 30.0
"""How long a batch waits to be taken before the box is told to come again."""

Reply = tuple[int, Acknowledged]
"""An HTTP status, and what the box is told."""


class Inbox:
    """One session's place in a Sink. `url` and `token` are what its box has to know."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self.token = token
        self.loop = asyncio.get_running_loop()
        self.client: tuple[object, ...] = ()
        """From where the box spoke last."""
        self.closed = False
        self._next = 0
        self._line: str | None = None
        self._answer: asyncio.Future[Reply] | None = None
        self._more = asyncio.Event()
        self._gone_at = 0.0

    @property
    def patience_s(self) -> float:
        """Seconds for which this box may still be silent; 0 for one that has not spoken, or is gone."""
        return max(0.0, self._gone_at - time.monotonic())

    async def line(self, *, within_s: float) -> str | None:
        """Return the batch that waits, or the next one; None when none came. It waits until `acknowledge` or `refuse`."""
        if self._line is None and within_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._more.wait(), within_s)
        self._more.clear()
        return self._line

    def acknowledge(self, offset: int) -> None:
        """Say how far the evidence was taken: the box goes on from there."""
        self._next = offset
        self._say(200, "")

    def refuse(self, offset: int, reason: str) -> None:
        """Say that the batch made no sense, and from where one would; who sends such is not waited for."""
        self._next = offset
        self._say(422, reason)
        self._gone_at = 0.0

    def lost(self) -> None:
        """The connection of the box was closed: whoever waits for it need not wait on."""
        self._gone_at = 0.0
        self._more.set()

    def close(self) -> None:
        """Take nothing more."""
        self.closed = True
        self._say(401, "The session is closed.")
        self.lost()

    async def offer(self, line: str) -> Reply:
        """Hold a batch until it was taken, and give the answer to it."""
        if self.closed:
            return self.reply(401, "The session is closed.")
        if self._answer is not None:
            return self.reply(409, "A batch of this session is waiting.")
        self._line, self._answer = line, self.loop.create_future()
        self._gone_at = time.monotonic() + HOLD_S + SILENCE_S
        self._more.set()
        try:
            return await asyncio.wait_for(self._answer, HOLD_S)
        except TimeoutError:
            return self.reply(503, "Nobody has taken the batch; send it again.")
        finally:
            self._line = self._answer = None
            self._more.clear()
            self._gone_at = min(self._gone_at, time.monotonic() + SILENCE_S)

    def reply(self, status: int, error: str) -> Reply:
        """Make an answer that takes nothing."""
        return status, Acknowledged(next=self._next, error=error)

    def _say(self, status: int, error: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(self.reply(status, error))
            self._gone_at = time.monotonic() + SILENCE_S
        self._line = None
