# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What a session is, and what came of it. Plain values: they refuse to do anything."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from boxstrap.controller import tools
from boxstrap.controller.activation import snippet
from boxstrap.controller.budgets import Budgets
from boxstrap.controller.collect import Gap
from boxstrap.controller.programs import Program
from boxstrap.runner.wire import Model, Outcome, Receipt, Request, ToolAccess

RELAY = "relay"
RELAY_URL = "http://relay.invalid/v1"
"""What a box is told of its model's URL when it is the controller that calls the model."""


@dataclass(frozen=True, kw_only=True)
class SessionSpec:
    """What a session is: which agent, where, with which budgets, and where the host keeps its evidence.

    `upstream` is "direct" (the box reaches `model.url`) or "relay" (this process makes the calls: the box needs no network, and
    the model's URL and headers never enter it).
    `out` is the host's folder for this session; the same `session_id` and `out` attach after a restart. `loopback_ok`
    says that the box shares the network in which a loopback URL is meant. `prewarm`: `open` starts in the box what needs no
    prompt (the gateway, the agent's imports), and `invoke` hands its request over to that. `allow_credentials` lets a request
    carry what looks like a provider's key. `program` says which program is meant where the agent is one. `activation` is a
    preset of activation.py or a bash snippet. `keep` leaves the session's folder in the box for whoever wants to look.
    """

    session_id: str
    agent: str
    workdir: str
    out: Path
    model: Model | None = None
    upstream: str = "direct"
    variant: str = "lean"
    runtime_root: str = ""
    session_root: str = ""
    interpreter: Path | None = None
    program: Program | None = None
    budgets: Budgets = field(default_factory=Budgets)
    loopback_ok: bool = False
    allow_credentials: bool = False
    user: str | int | None = None
    keep: bool = False
    prewarm: bool = True
    activation: str = ""
    env: dict[str, str] = field(default_factory=dict)
    argv: list[str] = field(default_factory=list)
    options: dict[str, object] = field(default_factory=dict)
    max_policy_calls: int | None = None
    tool_accesses: list[ToolAccess] = field(default_factory=list)

    def request(self, prompt: str, *, input: list[dict[str, object]] | None = None) -> Request:  # noqa: A002 (Responses' word)
        """Make the request that `invoke` takes: a prompt, or the input items of a Responses request."""
        return Request(
            session_id=self.session_id,
            agent=self.agent,
            workdir=self.workdir,
            prompt=prompt,
            model=self._model_in_the_box(),
            deadline_s=float(self.budgets.worker_s),
            activation=snippet(self.activation),
            env=self.env,
            argv=self.argv,
            options=self.options,
            max_policy_calls=self.max_policy_calls,
            tool_accesses=tools.in_the_box(self.tool_accesses) if self.upstream == RELAY else self.tool_accesses,
            input=input or [],
        )

    def _model_in_the_box(self) -> Model | None:
        if self.model is None or self.upstream != RELAY:
            return self.model
        return replace(self.model, url=RELAY_URL, headers={}, upstream=RELAY)


@dataclass(frozen=True, kw_only=True)
class Result:
    """How an invocation ended. All of it but `outcome`'s infrastructure verdict is agent-reported.

    `artifacts` payloads that were too large for a line lie beside the evidence, under artifacts/<sha256>. `resources_cookies`
    are those of the session's tool servers, as the agent left them.
    """

    outcome: Outcome
    detail: str
    receipt: Receipt | None
    evidence: Path
    events: int
    gaps: list[Gap]
    seconds: dict[str, float]
    artifacts: int = 0
    resources_cookies: dict[str, str] = field(default_factory=dict)
    provenance: str = "agent_reported"

    @property
    def gradable(self) -> bool:
        """Whether verification may turn this into a reward."""
        return self.outcome.gradable
