# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""From an agent's pipe to a bounded file and to whole lines. It refuses to block and to grow without a bound."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

OUTPUT_MAX = 64 * 1024 * 1024
"""Bytes of stdout, and of stderr, that are kept; what comes after is counted."""
LINE_MAX = 8 * 1024 * 1024
"""Bytes of one line that are looked at; the rest of it is dropped, and said."""
_READ = 256 * 1024


class Lines:
    """Splits a byte stream into lines of at most LINE_MAX bytes."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._skipping = False
        self.cut = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that `data` completes, without their newlines."""
        *whole, last = data.split(b"\n")
        for piece in whole:
            if not self._skipping:
                self._rest += piece[: LINE_MAX - len(self._rest)]
                yield bytes(self._rest)
            self._rest.clear()
            self._skipping = False
        if self._skipping:
            return
        room = LINE_MAX - len(self._rest)
        self._rest += last[:room]
        if len(last) > room:
            self.cut += 1
            self._skipping = True
            line = bytes(self._rest)
            self._rest.clear()
            yield line

    def end(self) -> Iterator[bytes]:
        """Yield the last line if it had no newline."""
        if self._rest:
            yield bytes(self._rest)
            self._rest.clear()


class Pump:
    """Reads one non-blocking pipe; writes to a file of at most OUTPUT_MAX bytes; hands each line to `on_line`."""

    def __init__(self, fd: int, *, path: str | None, on_line: Callable[[bytes], None] | None) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.total = 0
        self.open = True
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = -1 if path is None else os.open(path, flags, 0o600)
        self._on_line = on_line
        self.lines = Lines()

    @property
    def truncated(self) -> bool:
        """Whether the file holds less than what came."""
        return self._file >= 0 and self.total > OUTPUT_MAX

    def read(self) -> bool:
        """Take what is there once; False at the end of the stream (or when nothing is there now: see `open`)."""
        try:
            data = os.read(self.fd, _READ)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.open = False
            return False
        if self._file >= 0 and self.total < OUTPUT_MAX:
            with contextlib.suppress(OSError):  # a full disk costs the copy of the output, not the run
                os.write(self._file, data[: OUTPUT_MAX - self.total])
        self.total += len(data)
        if self._on_line is not None:
            for line in self.lines.feed(data):
                self._on_line(line)
        return True

    def close(self) -> None:
        """Hand over the last line and close both ends."""
        if self._on_line is not None:
            for line in self.lines.end():
                self._on_line(line)
        os.close(self.fd)
        if self._file >= 0:
            os.close(self._file)
