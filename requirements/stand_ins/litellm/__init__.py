# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Stands in for litellm where the model client is boxstrap's own: the few names that NOOA touches, and a clear no else.

litellm is nine tenths of NOOA's import time and of its bytes. This package refuses to imitate it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

modify_params = False
disable_aiohttp_transport = False
callbacks: list[object] = []


class NeedsFullPayload(ImportError):
    """Something asked for more of litellm than the lean payload holds."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} is not in boxstrap's lean payload, which has only a stand-in for litellm: use --payload full."
        )


def __getattr__(name: str) -> object:
    """Refuse every other attribute; names with double underscores are the import system's own questions."""
    if name.startswith("__"):
        raise AttributeError(name)
    raise NeedsFullPayload(f"litellm.{name}")


class _Refuse:
    """Comes last on sys.meta_path: a submodule that nobody found gets the same clear no."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.startswith("litellm."):
            raise NeedsFullPayload(name)
        return None


sys.meta_path.append(_Refuse)
