# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""One module per agent: how it is launched and how its output becomes evidence.

An agent module has `launch(request, session, runtime) -> Launch`, and, when its events come from stdout, a function
`parse(line) -> list of (kind, data)`. It refuses to keep state: everything it needs is in the request.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Protocol

from boxstrap.runner.layout import RuntimePaths, SessionPaths
from boxstrap.runner.wire import Kind, Request

NAMES = ("nooa", "command")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the supervisor starts. `interpreter` tells that argv[0] is our own Python: LD_* is kept from its loader.

    `env` comes on top of the agent's environment. `events` is "fd" (the agent writes event lines to the inherited
    descriptor) or "stdout" (its stdout lines go through the module's `parse`).
    """

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    interpreter: bool = False
    events: str = "stdout"


class Agent(Protocol):
    """The shape of an agent module."""

    def launch(self, request: Request, session: SessionPaths, runtime: RuntimePaths) -> Launch:
        """Say how to start it.

        Raises:
            ValueError: the request's options do not make sense for this agent.
        """

    def parse(self, line: bytes) -> list[tuple[Kind, dict[str, object]]]:
        """Turn one stdout line (without its newline) into events."""


def get(name: str) -> Agent:
    """Return the module of that agent.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in NAMES:
        raise ValueError(f"there is no agent {name!r}: choose one of {', '.join(NAMES)}")
    module: Agent = importlib.import_module(f"boxstrap.runner.agents.{name}")
    return module
