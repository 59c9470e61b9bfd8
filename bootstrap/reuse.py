# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Says whether a published runtime is whole. On the way of every warm start: it imports little and writes nothing."""

from __future__ import annotations

from boxstrap.bootstrap import manifest
from boxstrap.bootstrap.steps import Clock
from boxstrap.runner.layout import RuntimePaths
from boxstrap.runner.wire import Installed


def reuse(root: str, digest: str, *, hashes: bool, clock: Clock) -> Installed | list[str]:
    """Say that a published runtime is whole, or what is wrong with it."""
    path = RuntimePaths(root, digest).path
    with clock.phase("verify"):
        wrong, files, size = manifest.verify(path, digest=digest, hashes=hashes)
    if wrong:
        return wrong
    return Installed(v=1, state="reused", path=path, digest=digest, files=files, bytes=size, seconds=clock.total())
