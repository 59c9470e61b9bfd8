# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""One file from one URL, with bounds. It refuses to judge the bytes: whoever asked compares the digest that comes back."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import httpx

from boxstrap.controller.errors import ArtifactError

SILENCE_S = 60.0
"""Seconds without a byte."""
TOTAL_S = 1800.0
"""Seconds for a whole file."""
BYTES_MAX = 2 << 30


def fetch(url: str, target: Path, *, what: str) -> str:
    """Download to `target` and return the sha256 of what came.

    Raises:
        ArtifactError: the network failed, or a bound was reached (code "unreachable").
    """
    digest = hashlib.sha256()
    until = time.monotonic() + TOTAL_S
    try:
        with (
            httpx.Client(timeout=SILENCE_S, follow_redirects=True) as client,
            client.stream("GET", url) as response,
            target.open("wb") as out,
        ):
            response.raise_for_status()
            for chunk in response.iter_bytes(1 << 20):
                digest.update(chunk)
                out.write(chunk)
                if out.tell() > BYTES_MAX or time.monotonic() > until:
                    raise ArtifactError(
                        f"{what} did not end within {TOTAL_S:.0f} s and {BYTES_MAX >> 30} GiB.", code="unreachable"
                    )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ArtifactError(f"{what} could not be downloaded: {error}.", code="unreachable") from error
    return digest.hexdigest()


def corrupt(name: str, found: str, needed: str) -> ArtifactError:
    """Make the error for bytes that are not the expected ones; both are digests."""
    return ArtifactError(
        f"{name} has the digest {found[:16]}…, needed {needed[:16]}….",
        remedy="Look at the source and at the proxies on the way; nothing was kept.",
        code="upload-corrupt",
    )
