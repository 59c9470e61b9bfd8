# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The steps of an installation: how long each phase took, and the seam where a test may kill the process.

The steps are listed nowhere: a run that records them says what there is. It refuses to swallow a step: a name that
BOXSTRAP_FAULT asks for kills this process and the prelude that waits for it, as a power cut would, so that nobody is left
to tidy up; `NAME@prelude` and `NAME@python` kill only the one.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

FAULT = "BOXSTRAP_FAULT"
"""Environment variable: the step to die at, or the path of a file that records every step. prelude.sh reads it too."""


def step(name: str) -> None:
    """Die here, if this is the step that the fault sweep asks for, or note that it was reached."""
    fault = os.environ.get(FAULT, "")
    wanted, _, who = fault.partition("@")
    if wanted == name:
        if who != "python":
            os.kill(os.getppid(), signal.SIGKILL)
        if who != "prelude":
            os.kill(os.getpid(), signal.SIGKILL)
    elif fault.startswith("/"):
        with open(fault, "a", encoding="ascii") as record:
            record.write(f"{name}@python\n")


class Clock:
    """Seconds per phase, the prelude's phases first."""

    def __init__(self, marks: str = "") -> None:
        """Read the prelude's marks: `phase:uptime` pairs with commas, each saying when its phase ended."""
        self.seconds: dict[str, float] = {}
        ends = [(name, float(text)) for name, _, text in (mark.partition(":") for mark in marks.split(",") if mark)]
        if ends:
            ends.append(("hand-over", max(_uptime(), ends[-1][1])))
        for (_, earlier), (name, end) in itertools.pairwise(ends):
            self.seconds[name] = round(self.seconds.get(name, 0.0) + end - earlier, 3)
        self._began = time.monotonic() - (ends[-1][1] - ends[0][1] if ends else 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase under its name, which is also its step's."""
        step(name)
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - began, 3)

    def total(self) -> dict[str, float]:
        """All phases, and what they came to as `total`."""
        return {**self.seconds, "total": round(time.monotonic() - self._began, 3)}


def _uptime() -> float:
    """The prelude's clock: a shell without a builtin for the time can still read this."""
    try:
        with open("/proc/uptime", encoding="ascii") as source:
            return float(source.read().split()[0])
    except OSError:
        return 0.0
