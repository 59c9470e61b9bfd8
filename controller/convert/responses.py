# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A session as one Response of the Responses dialect: the model's items, each call followed by its result.

The shape is that of NeMo Gym 0.7.0 (NeMoGymResponse), whose verifiers read the last message. What the agent ran by itself, and
its resource calls, are calls as well, as in Gym's own NOOA agent. It refuses to hide an end that was no success: `status`,
`error` and `metadata` say what came of the session.
"""

from __future__ import annotations

from boxstrap.controller.convert import replies
from boxstrap.controller.convert.reading import Json
from boxstrap.controller.convert.story import PROVENANCE, Entry, Message, Story, Thought, ToolUse
from boxstrap.runner.wire import Outcome

_METADATA_MAX = 512
"""Characters of one metadata value, as the dialect has it."""
_STATUS = {
    Outcome.COMPLETED: "completed",
    Outcome.GAVE_UP: "completed",
    Outcome.POLICY_BUDGET_EXHAUSTED: "incomplete",
    Outcome.DEADLINE_EXCEEDED: "incomplete",
    Outcome.CANCELLED: "incomplete",
}


def to_responses(story: Story) -> Json:
    """Return the Response. Its `usage` is the sum over the calls that were answered, None when one of them told none."""
    status = _STATUS.get(Outcome(story.outcome), "failed") if story.outcome in set(Outcome) else "incomplete"
    failed = {"code": "server_error", "message": story.detail or story.outcome} if status == "failed" else None
    metadata = {"provenance": PROVENANCE, "agent": story.agent, "session_id": story.session_id}
    metadata |= {"outcome": story.outcome, "detail": story.detail}
    return {
        "id": f"boxstrap-{story.session_id}",
        "object": "response",
        "created_at": max((entry.at for entry in story.entries), default=0.0),
        "model": story.model,
        "status": status,
        "error": failed,
        "output": items(story.entries),
        "usage": usage(story),
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
        "metadata": {key: value[:_METADATA_MAX] for key, value in metadata.items() if value},
    }


def items(entries: list[Entry]) -> list[Json]:
    """Return the output items of these entries; calls that were made at once stay together, and their results follow."""
    told: list[Json] = []
    waiting: list[Json] = []
    for number, entry in enumerate(entries):
        if not (isinstance(entry, ToolUse) and entry.with_the_last):
            told += waiting
            waiting = []
        if isinstance(entry, ToolUse):
            told.append(entry.item or replies.function_call(entry.id, entry.name, entry.arguments, status=_done(entry)))
            waiting += _result(entry)
        elif isinstance(entry, Thought):
            told.append(entry.item or replies.reasoning(entry.text, f"{number:04d}"))
        elif isinstance(entry, Message):
            told.append(entry.item or _message(entry, number))
    return told + waiting


def usage(story: Story) -> Json | None:
    """Return the tokens of all answered calls."""
    known = [call.usage for call in story.answered]
    if not known or not all(known):
        return None

    def total(name: str) -> int:
        return sum(one.get(name, 0) for one in known)

    return {
        "input_tokens": total("input_tokens"),
        "input_tokens_details": {"cached_tokens": total("cached_tokens")},
        "output_tokens": total("output_tokens"),
        "output_tokens_details": {"reasoning_tokens": total("reasoning_tokens")},
        "total_tokens": total("input_tokens") + total("output_tokens"),
    }


def _done(use: ToolUse) -> str:
    return "completed" if use.output is not None else "incomplete"


def _result(use: ToolUse) -> list[Json]:
    if use.output is None:
        return []
    status = "completed" if use.status == "completed" else "incomplete"
    ids = {"id": f"fco_{use.id}", "call_id": use.id}
    return [{"type": "function_call_output", **ids, "output": use.output, "status": status}]


def _message(said: Message, number: int) -> Json:
    if said.role in {"user", "system", "developer"}:
        return {"type": "message", "role": said.role, "content": said.text}
    return replies.message(said.text, f"final_{number:04d}" if said.final else f"{number:04d}")
