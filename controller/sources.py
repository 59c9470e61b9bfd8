# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Where evidence comes from without being asked for each time: pushed by the box, or from a command held in it.

Both at once deliver each event once, since the collector goes by offset. It refuses to be relied on: where neither gives
anything, the caller asks.
"""

from __future__ import annotations

from collections.abc import Callable

from boxstrap.controller.collect import Collector
from boxstrap.controller.errors import EvidenceError
from boxstrap.controller.follower import Follower
from boxstrap.controller.inbox import Inbox
from boxstrap.runner.wire import Tail

FOLLOW_WAIT_S = 20.0
HANDOVER_S = 1.0
"""How long the first push is waited for, once: a box that does not reach the sink is followed after that."""
CHANGES_TOLD = 10
"""How often a session tells that the way of its evidence has changed: a box can change it for ever."""


class Sources:
    """The fast ways of one session. `inbox` is set where the box was told of a sink."""

    def __init__(self, collector: Collector, follower: Follower | None, note: Callable[[str], None]) -> None:
        self.inbox: Inbox | None = None
        self._collector = collector
        self._follower = follower
        self._note = note
        self._way = ""
        self._changes = 0

    async def next(self) -> Tail | None:
        """Take the next reply, on disk and delivered; None where none came, and it has to be asked for.

        Raises:
            EvidenceError: the evidence passed a cap.
        """
        tail = await self._pushed(self.inbox) if self.inbox is not None else None
        if tail is None and self._follower is not None and self._collector.offset > 0:
            tail = await self._followed(self._follower)
        return tail

    async def close(self) -> None:
        """Let go of what is held in the box."""
        if self._follower is not None:
            await self._follower.close()

    async def _pushed(self, inbox: Inbox) -> Tail | None:
        """Take what the box pushes, and acknowledge it; None while it is silent, makes no sense, or says that it has ended.

        Any process in there that reads the token could say so while the session runs: whether it is true is asked for.
        """
        begun = self._collector.offset > 0
        line = await inbox.line(within_s=max(inbox.patience_s, HANDOVER_S if begun and not self._way else 0.0))
        if line is None:
            if begun:
                self._tell("nothing is pushed: the evidence is pulled")
            return None
        try:
            tail = self._collector.feed(line)
        except EvidenceError as error:
            inbox.refuse(self._collector.offset, error.message)
            if not error.passing:
                raise
            return None
        inbox.acknowledge(self._collector.offset)
        self._tell("the box's evidence is pushed")
        await self.close()
        if tail.state != "running":
            self.inbox = None
            return None
        return tail

    async def _followed(self, follower: Follower) -> Tail | None:
        """Take the next reply of the held command, where it gives one that makes sense."""
        line = await follower.line(within_s=FOLLOW_WAIT_S)
        if line is None:
            return None
        try:
            return self._collector.feed(line)
        except EvidenceError as error:
            await follower.close()
            if not error.passing:
                raise
            return None

    def _tell(self, way: str) -> None:
        if way != self._way:
            self._way = way
            self._changes += 1
            if self._changes <= CHANGES_TOLD:
                self._note(way)
