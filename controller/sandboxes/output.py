# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What an exec came to, and how much of its output is kept.

Every adapter answers with one `Output`, so that what is true of one sandbox is true of all. It refuses to grow with
what a sandbox prints: each stream is cut at `OUTPUT_MAX`, and the cut says so in the text itself.
"""

from __future__ import annotations

from dataclasses import dataclass

OUTPUT_MAX = 16 * 1024 * 1024
"""Bytes of each stream that are kept."""
DOWNLOAD_MAX = 4 * 1024 * 1024 * 1024
"""Bytes of one download, unless the caller says otherwise."""
TRANSFER_TIMEOUT_S = 600.0
"""Seconds that one upload or download may take, unless the adapter was told otherwise."""
DRAIN_S = 0.5
"""Seconds that a finished command's streams are still read while a background child holds them open."""
PROVIDER_FAILED = 125
"""The return code that says the provider failed and not the command (NeMo Gym's convention)."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """What an exec came to. Implements `boxstrap.controller.sandbox.ExecResult`."""

    stdout: str
    stderr: str
    return_code: int
    error_type: str | None = None


class BoundedText:
    """One stream as it arrives: the first `limit` bytes are kept, the rest is counted."""

    def __init__(self, limit: int = OUTPUT_MAX) -> None:
        self._limit = limit
        self._kept = bytearray()
        self._seen = 0

    def add(self, chunk: bytes | memoryview) -> None:
        """Take the next bytes."""
        self._seen += len(chunk)
        room = self._limit - len(self._kept)
        if room > 0:
            self._kept += chunk[:room]

    def text(self) -> str:
        """Decode what was kept; bytes that are not UTF-8 are replaced, a cut is noted at the end."""
        text = self._kept.decode("utf-8", errors="replace")
        if self._seen <= self._limit:
            return text
        return f"{text}\n[boxstrap: truncated at {self._limit} of {self._seen} bytes]\n"


def failed(error_type: str, message: str, *, stdout: str = "", stderr: str = "") -> Output:
    """Say that the provider failed; the message ends stderr, after what the command had printed."""
    if stderr and not stderr.endswith("\n"):
        stderr += "\n"
    return Output(stdout=stdout, stderr=f"{stderr}{message}\n", return_code=PROVIDER_FAILED, error_type=error_type)


def bounded(value: str | bytes | None, *, limit: int = OUTPUT_MAX) -> str:
    """Make a provider's stdout or stderr a bounded text; None is empty."""
    if not value:
        return ""
    if isinstance(value, str) and len(value) * 4 <= limit:  # no character takes more than four bytes
        return value
    kept = BoundedText(limit)
    kept.add(value if isinstance(value, bytes) else value.encode("utf-8", errors="replace"))
    return kept.text()
