# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""One module per agent: how it is launched and how its output becomes evidence.

An agent `my-agent` is the module my_agent.py beside this file, and all of it is `launch(request, session, runtime) -> Launch`.
An agent that tells its story on stdout brings a parser in its Launch. It refuses to keep state in the module: everything
that it needs is in the request, and everything that one run remembers is in its parser.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from boxstrap.runner.layout import RuntimePaths, SessionPaths
from boxstrap.runner.wire import Kind, Model, Outcome, Request

Event = tuple[Kind, Mapping[str, object]]
"""One piece of evidence: DESIGN 10 has the kinds, nooa_hooks.py and json_lines.py the names of the fields."""


class UnusableError(Exception):
    """Raised by a parser: the agent waits for what it will never get (a login, for example). It is stopped: setup_failed."""


@dataclass(frozen=True, kw_only=True)
class End:
    """What a parser says at the end: last events, and the outcome if the output tells more than the exit code does."""

    events: Iterable[Event] = ()
    outcome: Outcome | None = None
    detail: str = ""


class Parser(Protocol):
    """Makes evidence of one run's stdout."""

    def feed(self, line: bytes) -> Iterable[Event]:
        """Turn one line (without its newline) into events.

        Raises:
            UnusableError: there is no point in going on.
        """

    def finish(self, exit_code: int | None) -> End:
        """Say what is left to say after the last line; `exit_code` is None when a signal ended the agent."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the supervisor starts. `interpreter` tells that argv[0] is our own Python: LD_* is kept from its loader.

    `env` comes on top of the agent's environment. `stdin` is a file that the agent reads (nothing by default). `parser`
    gets its stdout; without one, the agent writes event lines to an inherited descriptor and has to say how it ended.
    """

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    interpreter: bool = False
    stdin: str = os.devnull
    parser: Parser | None = None


class Agent(Protocol):
    """The shape of an agent module. With `WAITS = True`, what it launches may start before there is a prompt: see driver.py."""

    def launch(self, request: Request, session: SessionPaths, runtime: RuntimePaths) -> Launch:
        """Say how to start it.

        Raises:
            ValueError: the request's options do not make sense for this agent.
        """


def get(name: str) -> Agent:
    """Return the module of that agent.

    Raises:
        ValueError: there is none of that name.
    """
    path = f"{__name__}.{name.replace('-', '_')}"
    known = re.fullmatch(r"[a-z][a-z0-9-]*", name) and importlib.util.find_spec(path)
    module: Agent | None = importlib.import_module(path) if known else None
    if module is None or not hasattr(module, "launch"):
        raise ValueError(f"there is no agent {name!r}: found no module of that name in runner/agents that has a launch()")
    return module


def options_of(request: Request, *, dialects: tuple[str, ...], **kinds: type) -> tuple[Model, dict[str, Any]]:
    """Return the model and the options of a request for an agent that speaks `dialects` and knows options of these `kinds`.

    Raises:
        ValueError: there is no model, it speaks another dialect, or an option is unknown (a typo must not become a default).
    """
    who, model = f"agent {request.agent}", request.model
    if model is None:
        raise ValueError(f"{who}: found no model, needed its url and name")
    if model.api not in dialects:
        raise ValueError(f"{who}: found model api {model.api!r}, needed {' or '.join(dialects)}")
    for name, value in request.options.items():
        kind = kinds.get(name)
        if kind is None:
            raise ValueError(f"{who}: found option {name!r}, needed one of {', '.join(kinds) or 'none'}")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{who}: found {name}={value!r}, needed {kind.__name__}")
    return model, dict(request.options)


def private_file(session: SessionPaths, name: str, text: str) -> str:
    """Write a file that only this user reads into the session's folder and return its path: prompts, configuration."""
    path = os.path.join(session.tmp, name)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    return path


def merged(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """Merge two configurations deeply: where both have a mapping, theirs are merged, elsewhere `over` wins."""
    result = dict(base)
    for key, value in over.items():
        mine = result.get(key)
        result[key] = merged(mine, value) if isinstance(mine, Mapping) and isinstance(value, Mapping) else value
    return result
