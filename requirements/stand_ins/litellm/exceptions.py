# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The one exception that NOOA's actor catches by name."""

from __future__ import annotations


class ContextWindowExceededError(Exception):
    """The model refused a request as too long; a client of ours may raise it so that NOOA shortens its context."""

    def __init__(self, message: str = "", model: str = "", llm_provider: str = "", **_: object) -> None:
        super().__init__(message)
        self.message = message
        self.model = model
        self.llm_provider = llm_provider


def __getattr__(name: str) -> object:
    """Refuse every other exception as the package does."""
    if name.startswith("__"):
        raise AttributeError(name)
    from . import NeedsFullPayload  # noqa: PLC0415  # only when it is raised

    raise NeedsFullPayload(f"litellm.exceptions.{name}")
