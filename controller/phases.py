# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Named steps with their seconds, and notes of what takes long, so that a slow start says where it was slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Phases:
    """The host's phases of one session, in order; `on_phase` hears of each as it ends, `on_note` of long work as it begins."""

    def __init__(
        self, on_phase: Callable[[str, float], None] | None = None, on_note: Callable[[str], None] | None = None
    ) -> None:
        self.seconds: dict[str, float] = {}
        self._on_phase = on_phase
        self._on_note = on_note

    def note(self, text: str) -> None:
        """Tell of work that takes long, such as building an artifact. Called from any thread."""
        if self._on_note is not None:
            self._on_note(text)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time one step; a step that fails is told too."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - begun)

    def add(self, name: str, seconds: float) -> None:
        """Record a step that was timed elsewhere."""
        self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 4)
        if self._on_phase is not None:
            self._on_phase(name, seconds)
