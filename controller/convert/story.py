# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The evidence of one session as a story: what was asked, thought, said and done, in order, each call beside its result.

All three target shapes are made from it, and telling.py tells it. It refuses to know of events: these are only its words.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from boxstrap.controller.convert.reading import Json, number, text

PROVENANCE = "agent_reported"
ROOT = "root"
"""The invocation of an agent that does not tell of invocations."""


@dataclass(kw_only=True)
class Message:
    """A text of one role. `final` is the value that the agent returned, which no model wrote as such."""

    at: float
    invocation: str
    role: str
    text: str
    final: bool = False
    item: Json | None = None


@dataclass(kw_only=True)
class Thought:
    """Reasoning of the model."""

    at: float
    invocation: str
    text: str
    item: Json | None = None


@dataclass(kw_only=True)
class ToolUse:
    """A call of a tool and what came of it. `output` is None while no result is known; times are unix seconds.

    `parent` is the tool call in which this one happened: a resource call inside a cell. `by_model` is false for what the agent
    ran by itself. `status` is completed, failed, interrupted, incomplete, or what the agent called it. `with_the_last` tells
    that the model made it at once with the call before it, whose result it did not know.
    """

    at: float
    invocation: str
    id: str
    name: str
    arguments: str
    by_model: bool = True
    parent: str = ""
    status: str = "incomplete"
    output: str | None = None
    error: str = ""
    started_at: float | None = None
    completed_at: float | None = None
    seconds: float | None = None
    with_the_last: bool = False
    item: Json | None = None

    def end(self, data: Json, output: str) -> None:
        """Take what is known of its end."""
        self.output = output
        self.status = text(data.get("status"), "unknown")
        self.started_at = number(data.get("started_at")) or self.started_at
        self.completed_at = number(data.get("completed_at"))
        self.seconds = number(data.get("seconds"))
        if self.completed_at is None and self.started_at is not None and self.seconds is not None:
            self.completed_at = self.started_at + self.seconds


@dataclass(kw_only=True)
class ModelCall:
    """One attempt of a model call. `error` is empty when it was answered."""

    at: float
    invocation: str
    seq: int
    model: str
    dialect: str
    error: str
    response_id: str
    finish_reason: str
    usage: dict[str, int]
    seconds: float | None
    request: Json


@dataclass(kw_only=True)
class Invocation:
    """One call of an agent, or of an agent below it."""

    id: str
    parent: str = ""
    method: str = ""
    status: str = "unknown"
    seconds: float | None = None


@dataclass(kw_only=True)
class Gap:
    """Something that is missing, or is not what it seems."""

    code: str
    detail: str = ""
    invocation: str = ""


Entry = Message | Thought | ToolUse | ModelCall


@dataclass(kw_only=True)
class Story:
    """A session. `outcome` is wire.Outcome's word, or empty when nobody knows; `receipt` is empty when there is none."""

    session_id: str = ""
    agent: str = "unknown"
    version: str = "unknown"
    prompt: str = ""
    outcome: str = ""
    detail: str = ""
    result: Json = field(default_factory=dict)
    receipt: Json = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    summaries: list[Message] = field(default_factory=list)
    invocations: dict[str, Invocation] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)

    @property
    def model(self) -> str:
        """Return the name of the model that was asked first."""
        return next((call.model for call in self.calls if call.model), "unknown")

    @property
    def calls(self) -> list[ModelCall]:
        """Return every attempt of a model call."""
        return [entry for entry in self.entries if isinstance(entry, ModelCall)]

    @property
    def answered(self) -> list[ModelCall]:
        """Return the calls that were answered."""
        return [call for call in self.calls if not call.error]

    @property
    def root(self) -> str:
        """Return the invocation that everything else is part of."""
        parents = [one.id for one in self.invocations.values() if not one.parent]
        return parents[0] if parents else ROOT

    @property
    def tools(self) -> list[ToolUse]:
        """Return every call of a tool."""
        return [entry for entry in self.entries if isinstance(entry, ToolUse)]

    @property
    def final(self) -> Message | None:
        """Return the value that the agent returned."""
        return next((entry for entry in reversed(self.entries) if isinstance(entry, Message) and entry.final), None)
