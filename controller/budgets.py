# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Deadlines that must fit into each other, in seconds.

    sandbox_ttl   ├────────────────────────────────────────────────────────────────────────┤
    episode       ├──────────────────────────────────────────────────────┤ callbacks ┤
    worker        ├─────────────────────────────────────────┤ command ┤

The defaults are those of NeMo Gym's SWE-bench Pro recipe. It refuses to shorten a deadline by itself: a configuration
that cannot hold is an error that shows the sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from boxstrap.controller.errors import BudgetError

PATCH_COMMANDS = 2
"""After the agent: one command makes the patch, one removes the patch file."""


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """How long each part may take."""

    worker_s: float = 21_420
    """The agent, from its start to the last process gone: the runner's ceiling."""
    episode_s: float = 21_600
    """One activation as the environment server sees it, set-up included."""
    sandbox_ttl_s: float | None = 25_200
    """The sandbox's own life, after which its provider takes it away; None where it has no end."""
    command_s: float = 180
    """One command in the sandbox."""
    stop_s: float = 120
    """Stopping what runs in the sandbox."""
    callback_s: float = 180
    """One callback of the final cleanup."""
    callbacks: int = 3
    """How many callbacks the final cleanup has at most."""

    def with_worker(self, seconds: float) -> Budgets:
        """Give the same budgets with another ceiling for the agent; it still has to fit."""
        return replace(self, worker_s=seconds)

    def check(self) -> None:
        """Refuse a configuration in which one deadline cannot fit into another.

        Raises:
            BudgetError: with the sum shown.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "sandbox_ttl_s":
                continue
            least = 0 if field.name == "callbacks" else math.ulp(0.0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
                raise BudgetError(
                    f"Found {field.name} = {value!r}, needed a finite number above zero.",
                    remedy=f"Set {field.name} in seconds.",
                )
        cleanup = ("stop_s", 1), ("callback_s", self.callbacks)
        self._fits((("worker_s", 1), ("command_s", 1)), "episode_s")
        if self.sandbox_ttl_s is not None:
            self._fits((("worker_s", 1), ("command_s", PATCH_COMMANDS), *cleanup), "sandbox_ttl_s")
            self._fits((("episode_s", 1), *cleanup), "sandbox_ttl_s")

    def _fits(self, parts: tuple[tuple[str, int], ...], whole: str) -> None:
        total = sum(getattr(self, name) * times for name, times in parts)
        room = getattr(self, whole)
        if total < room or (total == room and whole != "sandbox_ttl_s"):  # at its end the sandbox is already gone
            return
        terms = " + ".join(f"{f'{times} x ' if times != 1 else ''}{name} {getattr(self, name):g}" for name, times in parts)
        raise BudgetError(
            f"Found {terms} = {total:g} s, which does not fit into {whole} {room:g} s.",
            remedy=f"Shorten {parts[0][0]}, or lengthen {whole}.",
        )
