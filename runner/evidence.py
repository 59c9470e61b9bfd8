# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The append-only evidence log: one writer, one line an event, one write(2) a line.

It refuses to lose silently: what could not be written is counted and named by a `gap` as soon as writing works again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping

from boxstrap.runner.wire import EVIDENCE_LINE_MAX, VERSION, Kind

FSYNC_EVERY_S = 1.0
EVIDENCE_MAX = 512 * 1024 * 1024
"""Bytes of one session's evidence; later events are counted in a gap instead."""
_KEPT_WHEN_SPILLED = 1024


class EvidenceLog:
    """The writer of evidence.ndjson; artifacts/ takes what is too large for a line."""

    def __init__(self, path: str, artifacts: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._artifacts = artifacts
        self._hash = hashlib.sha256()
        self._synced_at = time.monotonic()
        self._dirty = False
        self.seq = 0
        self.bytes = 0
        self.dropped = 0

    @property
    def sha256(self) -> str:
        """Hex digest of every byte written so far."""
        return self._hash.hexdigest()

    def append(self, kind: Kind, data: Mapping[str, object]) -> None:
        """Write one event. Never raises for a full disk: the loss is counted and named later."""
        if self.dropped and kind is not Kind.GAP:
            dropped, self.dropped = self.dropped, 0
            self.append(Kind.GAP, {"code": "evidence_write_failed", "dropped": dropped})
            if self.dropped:  # it could not be written either, and is no event of the agent's
                self.dropped = dropped
        line = self._line(kind, data)
        if len(line) > EVIDENCE_LINE_MAX:
            line = self._line(kind, self._spilled(data))
        if self.bytes + len(line) > EVIDENCE_MAX and kind not in {Kind.GAP, Kind.AGENT_EXITED, Kind.ENDED}:
            self.dropped += 1
            return
        try:
            written = os.write(self._fd, line)
        except OSError:
            written = 0
        if written != len(line):
            if written:
                os.ftruncate(self._fd, self.bytes)
            self.dropped += 1
            return
        self.seq += 1
        self.bytes += written
        self._hash.update(line)
        self._dirty = True
        self.sync(every_s=FSYNC_EVERY_S)

    def sync(self, *, every_s: float = 0.0) -> None:
        """Put what was written on disk, at most once in `every_s` seconds."""
        now = time.monotonic()
        if self._dirty and now - self._synced_at >= every_s:
            try:
                os.fdatasync(self._fd)
            except OSError:
                return
            self._synced_at, self._dirty = now, False

    def close(self) -> None:
        """Name what was dropped, sync, and close."""
        if self.dropped:
            dropped, self.dropped = self.dropped, 0
            self.append(Kind.GAP, {"code": "evidence_write_failed", "dropped": dropped})
        self.sync()
        os.close(self._fd)

    def _line(self, kind: Kind, data: Mapping[str, object]) -> bytes:
        event = {
            "v": VERSION,
            "seq": self.seq + 1,
            "t": time.time(),
            "mono": time.monotonic(),
            "kind": kind.value,
            "data": data,
        }
        return json.dumps(event, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"

    def _spilled(self, data: Mapping[str, object]) -> dict[str, object]:
        """Move the whole payload to artifacts/ by digest and keep the small fields in the line."""
        body = json.dumps(data, separators=(",", ":"), allow_nan=False).encode("ascii")
        digest = hashlib.sha256(body).hexdigest()
        kept: dict[str, object] = {key: value for key, value in data.items() if len(json.dumps(value)) <= _KEPT_WHEN_SPILLED}
        path = os.path.join(self._artifacts, digest)
        try:
            os.makedirs(self._artifacts, mode=0o700, exist_ok=True)
            with open(os.open(f"{path}.part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
                file.write(body)
            os.rename(f"{path}.part", path)
        except OSError as error:
            return {**kept, "artifact_lost": str(error.strerror), "artifact_bytes": len(body)}
        return {**kept, "artifact": digest, "artifact_bytes": len(body)}


def plain(value: object, *, depth: int = 32) -> object:
    """Make any parsed value fit for a line: no lone surrogates, no NaN, bounded depth."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, float):
        return value if value == value and value not in (float("inf"), float("-inf")) else str(value)  # noqa: PLR0124 (NaN)
    if depth == 0:
        return str(value)[:_KEPT_WHEN_SPILLED]
    if isinstance(value, Mapping):
        return {str(plain(str(key))): plain(item, depth=depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, depth=depth - 1) for item in value]
    return value if value is None or isinstance(value, (bool, int)) else str(value)
