# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Evidence on the host: appended by byte offset, strictly validated, each event delivered exactly once.

What a sandbox sends is hostile input: it is bounded, parsed as data and never trusted. What was read is on the host's disk
before it counts as read. It refuses to lose the rest because one line is bad: that line becomes a gap with a name.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic import TypeAdapter, ValidationError

from boxstrap.controller.errors import EvidenceError
from boxstrap.runner.wire import EVIDENCE_LINE_MAX, Event, Receipt, Tail

EVIDENCE_MAX = 1024 * 1024 * 1024
"""Bytes that one session may put on the host's disk."""
SYNC_EVERY_S = 1.0
GAPS_MAX = 1000
"""Gaps that are kept one by one; more are only counted."""
ARTIFACTS_MAX = 1000
"""Artifacts of one session that the host brings out."""
_DIGEST = re.compile(r"[0-9a-f]{64}")

_EVENT = TypeAdapter(Event)
_TAIL = TypeAdapter(Tail)


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Something of the evidence that is missing or unreadable, and where (byte offset in evidence.ndjson)."""

    code: str
    offset: int
    detail: str


class Collector:
    """The reader of one session. `offset` is how far the host has the evidence on disk."""

    def __init__(self, folder: Path, on_event: Callable[[Event], None] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = folder / "evidence.ndjson"
        self._on_event = on_event
        self._file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600), "r+b")
        self._rest = b""
        self._skipping = False
        self._synced_at = 0.0
        self._seq = 0
        self.events = 0
        self.gaps: list[Gap] = []
        self.gap_count = 0
        self.artifacts: dict[str, bool] = {}
        """The digests that events name, and whether it was decided what became of each (see fetch.py)."""
        self.offset = 0
        self._resume()

    def _resume(self) -> None:
        """Read what an earlier controller collected: those events were delivered, so nothing is called for them."""
        on_event, self._on_event = self._on_event, None
        self._file.seek(0)
        while data := self._file.read(1024 * 1024):
            self._take(data)
        self._on_event = on_event

    def feed(self, reply: str) -> Tail:
        """Take one reply of `tail`: write it down, then deliver its events. A repeated reply delivers nothing twice.

        Raises:
            EvidenceError: it is not a reply of `tail`, or a cap was passed.
        """
        try:
            tail = _TAIL.validate_json(reply)
            data = base64.b64decode(tail.chunk, validate=True)
        except ValueError as error:  # pydantic's and base64's are both such
            raise EvidenceError(
                "The sandbox answered `tail` with something else.",
                remedy=f"Look at what runs there: {str(error)[:200]!r}.",
            ) from error
        if tail.start > self.offset or tail.start < 0:
            raise EvidenceError(f"The sandbox answered from byte {tail.start}, needed byte {self.offset}.")
        data = data[self.offset - tail.start :]
        self._keep(data)
        return tail

    def feed_file(self, path: Path) -> None:
        """Take what a copy of the whole evidence.ndjson has beyond what was read; what was read must be its beginning.

        Raises:
            EvidenceError: it begins with something else, or a cap was passed.
        """
        with path.open("rb") as file:
            if file_digest(file, self.offset) != self.sha256():
                raise EvidenceError("The evidence in the box does not begin with what was collected.", code="evidence-changed")
            while data := file.read(1024 * 1024):
                self._keep(data)

    def _keep(self, data: bytes) -> None:
        """Write it down, then deliver it."""
        if self.offset + len(data) > EVIDENCE_MAX:
            raise EvidenceError(
                f"The evidence passed {EVIDENCE_MAX} bytes.", remedy="The session is stopped.", code="evidence-cap"
            )
        if data:
            self._file.write(data)
            self._file.flush()
            self._sync(every_s=SYNC_EVERY_S)
            self._take(data)

    def _sync(self, *, every_s: float = 0.0) -> None:
        """Put it on the disk. What is written is safe from a killed controller at once, from a lost host within a second."""
        now = time.monotonic()
        if now - self._synced_at >= every_s:
            self._synced_at = now
            os.fsync(self._file.fileno())

    def note(self, code: str, detail: str) -> None:
        """Name something else that is missing."""
        self._gap(code, self.offset, detail)

    def end(self, receipt: Receipt | None) -> None:
        """Name a torn last line, and compare what was collected with what the receipt says was written."""
        self._sync()
        if self._rest:
            self._gap("torn_line", self.offset - len(self._rest), f"{len(self._rest)} bytes without an end")
            self._rest = b""
        if receipt is not None and (receipt.evidence_bytes != self.offset or receipt.evidence_sha256 != self.sha256()):
            self._gap(
                "receipt_mismatch", self.offset, f"the receipt says {receipt.evidence_bytes} bytes, {self.offset} collected"
            )

    def sha256(self) -> str:
        """Return the digest of what is on the host's disk."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def close(self) -> None:
        """Release the file."""
        self._file.close()

    def _take(self, data: bytes) -> None:
        begin = self.offset - len(self._rest)
        self.offset += len(data)
        if self._skipping:
            _, newline, data = data.partition(b"\n")
            if not newline:
                return
            self._skipping, begin = False, self.offset - len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line, begin)
            begin += len(line) + 1
        if len(self._rest) > EVIDENCE_LINE_MAX:
            self._gap("line_too_long", begin, f"more than {EVIDENCE_LINE_MAX} bytes")
            self._rest, self._skipping = b"", True

    def _line(self, line: bytes, begin: int) -> None:
        if len(line) > EVIDENCE_LINE_MAX:
            self._gap("line_too_long", begin, f"{len(line)} bytes")
            return
        try:
            event = _EVENT.validate_json(line)
        except ValidationError as error:
            self._gap("bad_line", begin, str(error.errors(include_url=False, include_input=False)[0]["msg"])[:200])
            return
        if event.seq <= self._seq:
            self._gap("repeated_seq", begin, f"{event.seq} after {self._seq}")
            return
        if event.seq != self._seq + 1:
            self._gap("missing_seq", begin, f"{self._seq + 1} to {event.seq - 1}")
        self._seq = event.seq
        self.events += 1
        digest = event.data.get("artifact")
        if isinstance(digest, str) and _DIGEST.fullmatch(digest) and len(self.artifacts) < ARTIFACTS_MAX:
            self.artifacts.setdefault(digest, False)
        if self._on_event is not None:
            self._on_event(event)

    def _gap(self, code: str, offset: int, detail: str) -> None:
        self.gap_count += 1
        if len(self.gaps) < GAPS_MAX:
            self.gaps.append(Gap(code=code, offset=offset, detail=detail))


def file_digest(file: BinaryIO, length: int) -> str:
    """Return the digest (sha256, hex) of the next `length` bytes, or of as many as there are."""
    sha = hashlib.sha256()
    while length and (data := file.read(min(length, 1024 * 1024))):
        sha.update(data)
        length -= len(data)
    return sha.hexdigest()


def read_events(path: Path) -> Iterator[Event]:
    """Yield the valid events of a collected evidence.ndjson."""
    with path.open("rb") as file:
        for line in file:
            try:
                yield _EVENT.validate_json(line)
            except ValidationError:
                continue
