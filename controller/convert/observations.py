# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A session as NeMo Gym's AgentObservationBundle (0.7.0): invocations, tool calls, compactions, the sandbox, and the gaps.

The bundle has no place for provenance but its `source`, so that is where it stands. It refuses to guess who owns a model call:
without the name of Gym's model server there is nothing to join by, and a gap says so.
"""

from __future__ import annotations

from collections.abc import Callable

from boxstrap.controller.convert.reading import Json, content_text, count, listing, mapping, number, text
from boxstrap.controller.convert.responses import items
from boxstrap.controller.convert.story import PROVENANCE, Gap, Invocation, Story, ToolUse
from boxstrap.runner.wire import Outcome

_TERMINATION = {
    Outcome.GAVE_UP: "gave_up",
    Outcome.POLICY_BUDGET_EXHAUSTED: "policy_budget_exceeded",
    Outcome.DEADLINE_EXCEEDED: "agent_run_timeout",
    Outcome.CANCELLED: "cancelled",
    Outcome.AGENT_FAILED: "agent_run_error",
    Outcome.MODEL_FAILED: "infrastructure_error",
    Outcome.RESOURCE_FAILED: "infrastructure_error",
    Outcome.SETUP_FAILED: "infrastructure_error",
    Outcome.SANDBOX_LOST: "infrastructure_error",
}
_INCOMPLETE = {Outcome.POLICY_BUDGET_EXHAUSTED, Outcome.DEADLINE_EXCEEDED, Outcome.CANCELLED, Outcome.SANDBOX_LOST}
_TOOL_STATUS = {"interrupted": "cancelled"}
_TOOL_STATUSES = {"completed", "failed", "timeout", "cancelled", "incomplete"}
_SANDBOX = {
    Outcome.COMPLETED: "completed",
    Outcome.GAVE_UP: "completed",
    Outcome.POLICY_BUDGET_EXHAUSTED: "completed",
    Outcome.DEADLINE_EXCEEDED: "timeout",
    Outcome.CANCELLED: "cancelled",
    Outcome.SANDBOX_LOST: "sandbox_error",
    Outcome.SETUP_FAILED: "sandbox_error",
}


def to_observations(story: Story, *, model_ref: str = "", sandbox_id: str = "") -> Json:
    """Return the bundle.

    Args:
        story: the session.
        model_ref: the name of the model server in Gym's configuration, by which its captured calls are joined.
        sandbox_id: what the sandbox's provider calls it.
    """
    gaps = [*story.gaps]
    if story.answered and not model_ref:
        gaps.append(Gap(code="model_call_ownership_unavailable", detail="no model server was named"))
    if not story.receipt:
        gaps.append(Gap(code="sandbox_result_unavailable", detail="the session left no receipt"))
    if reason := _reason(story):
        gaps.append(Gap(code=reason, detail=story.detail))
    records = [_invocation(story, one, model_ref) for one in story.invocations.values()]
    records += [_tool(use, sandbox_id) for use in story.tools]
    records += [
        _bare(
            kind="context_compaction", invocation_id=one.invocation, observed_at=one.at, outcome="completed", summary=one.text
        )
        for one in story.summaries
    ]
    if story.receipt:
        records.append(_sandbox(story, sandbox_id))
    told = [_bare(code=gap.code, invocation_id=gap.invocation, detail=gap.detail) for gap in gaps]
    return {"source": f"boxstrap/{story.agent} ({PROVENANCE})", "records": records, "gaps": told}


def _reason(story: Story) -> str:
    said = text(story.result.get("termination_reason"))
    return said or (_TERMINATION.get(Outcome(story.outcome), "") if story.outcome in set(Outcome) else "outcome_unknown")


def _invocation(story: Story, one: Invocation, model_ref: str) -> Json:
    mine = [entry for entry in story.entries if entry.invocation == one.id]
    calls = [call for call in story.answered if call.invocation == one.id]
    ref = {"type": "responses_api_models", "name": model_ref}
    outcome = Outcome(story.outcome) if story.outcome in set(Outcome) else None
    status, error = {"interrupted": "incomplete"}.get(one.status, one.status), ""
    if one.id == story.root and outcome is not None:  # the session's end is known better than the call's
        error = _reason(story)
        status = "completed" if outcome is Outcome.COMPLETED else "incomplete" if outcome in _INCOMPLETE else "failed"
    return _bare(
        kind="agent_invocation",
        invocation_id=one.id,
        parent_invocation_id=one.parent if one.parent != one.id and not _circles(story, one) else "",
        status=status if status in {"completed", "failed", "incomplete"} else "unknown",
        duration_ms=None if one.seconds is None else one.seconds * 1000,
        error_type=error,
        model_calls=[{"model_ref": ref, "response_id": call.response_id} for call in calls if model_ref and call.response_id],
        conversation=[*_asked(story, one), *items(mine)],
    )


def _circles(story: Story, one: Invocation) -> bool:
    """Tell whether an invocation is its own ancestor: an agent may say so, a bundle may not."""
    seen, parent = {one.id}, one.parent
    while parent in story.invocations and parent not in seen:
        seen.add(parent)
        parent = story.invocations[parent].parent
    return parent in seen


def _asked(story: Story, one: Invocation) -> list[Json]:
    """Return what an invocation was first asked: the first request's messages where they are whole, else the prompt."""
    first = next((call.request for call in story.answered if call.invocation == one.id), {})
    told: list[Json] = []
    if instructions := text(first.get("instructions")):
        told.append({"type": "message", "role": "system", "content": instructions})
    sent = first.get("input", first.get("messages"))
    for said in [{"role": "user", "content": sent}] if isinstance(sent, str) else map(mapping, listing(sent)):
        role, words = text(said.get("role")), content_text(said.get("content"))
        if role in {"user", "system", "developer", "assistant"} and words:
            told.append({"type": "message", "role": role, "content": words})
    if not told and one.id == story.root and story.prompt:
        told.append({"type": "message", "role": "user", "content": story.prompt})
    return told


def _tool(use: ToolUse, sandbox_id: str) -> Json:
    begun, ended = use.started_at, use.completed_at
    status = _TOOL_STATUS.get(use.status, use.status)
    return _bare(
        kind="tool_call",
        invocation_id=use.invocation,
        tool_call_id=use.id,
        sandbox_id=sandbox_id,
        tool_name=use.name,
        started_at=begun,
        completed_at=ended if begun is None or ended is None or ended >= begun else None,
        duration_ms=None if use.seconds is None else use.seconds * 1000,
        timing_source="harness" if use.seconds is not None else None,
        status=status if status in _TOOL_STATUSES else "unknown",
        error_type=use.error,
    )


def _sandbox(story: Story, sandbox_id: str) -> Json:
    """Tell of the session's processes; what else ran in the sandbox is its owner's to tell, and so is its peak memory."""
    receipt = story.receipt
    begun, ended = number(receipt.get("started_at")), number(receipt.get("ended_at"))
    outcome = _SANDBOX.get(Outcome(story.outcome), "failed") if story.outcome in set(Outcome) else "unknown"
    exit_code = receipt.get("exit_code")
    return _bare(
        kind="sandbox",
        role="agent",
        sandbox_id=sandbox_id,
        outcome="oom" if receipt.get("oom_killed") is True and outcome == "failed" else outcome,
        exit_code=exit_code if isinstance(exit_code, int) and count(abs(exit_code)) is not None else None,
        wall_time_s=ended - begun if begun is not None and ended is not None and ended >= begun else None,
        cpu_time_s=number(receipt.get("cpu_seconds")),
        resource_usage_source=f"boxstrap receipt, the session's processes only ({PROVENANCE})",
    )


def _bare(**fields: object) -> Json:
    """Return the fields that say something."""
    said: Callable[[object], bool] = lambda value: value is not None and value != ""  # noqa: E731
    return {name: value for name, value in fields.items() if said(value)}
