# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The agent's end of the event pipe: one JSON object a line, one write a line; the supervisor stamps and stores them.

For drivers that run in the agent's own process. It refuses to let an agent act unrecorded: when nobody reads any more,
the process ends.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, MutableMapping

from boxstrap.runner.environment import EVENTS_FD
from boxstrap.runner.wire import ExitStatus, Kind

TEXT_MAX = 64 * 1024
"""Characters of one text field; what is longer keeps its head and its tail."""
_LOCK_BOUND_S = 1.0


def clip(text: str, limit: int = TEXT_MAX) -> str:
    """Return the text, or its head and tail around a note of how much is missing."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters are left out …]\n{text[-half:]}"


class EventWriter:
    """Writes event lines; any thread may call it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._ended = False

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str]) -> EventWriter:
        """Take the descriptor that the environment names, out of the environment and out of reach of children.

        Raises:
            ValueError: there is none.
        """
        number = environ.pop(EVENTS_FD, "")
        if not number.isdigit():
            raise ValueError(f"found {EVENTS_FD}={number!r}, needed the number of an open descriptor")
        os.set_inheritable(int(number), False)
        return cls(int(number))

    def emit(self, kind: Kind, data: Mapping[str, object]) -> None:
        """Write one event. After the result nothing is written any more."""
        self._write({"kind": kind.value, "data": data})

    def result(self, status: str, detail: str, result: Mapping[str, object] | None) -> None:
        """Write the last line: how it ended, in one sentence, and what came of it."""
        self._write({"kind": "result", "data": {"status": status, "detail": clip(detail, 2000), "result": result}}, last=True)

    def _write(self, event: Mapping[str, object], *, last: bool = False) -> None:
        line = _encode(event)
        if not self._lock.acquire(timeout=_LOCK_BOUND_S if last else -1):
            return  # a writer hangs in a full pipe; the supervisor learns the rest from the exit status
        try:
            if self._ended:
                return
            self._ended = last
            view = memoryview(line)
            while view:
                view = view[os.write(self._fd, view) :]
        except BrokenPipeError:
            os._exit(ExitStatus.BUG)
        finally:
            self._lock.release()


def _encode(event: Mapping[str, object]) -> bytes:
    try:
        text = json.dumps(event, separators=(",", ":"), allow_nan=False, skipkeys=True, default=str)
    except ValueError:  # NaN, or a structure that contains itself
        try:
            loose = json.loads(json.dumps(event, skipkeys=True, default=str), parse_constant=str)
        except ValueError:
            loose = {"kind": event["kind"], "data": {"text": clip(repr(event["data"]))}}
        text = json.dumps(loose, separators=(",", ":"))
    return text.encode("ascii") + b"\n"
