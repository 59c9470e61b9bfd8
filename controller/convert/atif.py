# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A session as a trajectory of the Agent Trajectory Interchange Format (Harbor's ATIF, version 1.7).

One step for each answer of the model, with what came of its calls as the step's observation. It refuses to count what was no
answer of the model as one: those steps say `llm_call_count: 0`, and failed attempts are only counted.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime

from boxstrap.controller.convert.reading import Json, mapping
from boxstrap.controller.convert.story import PROVENANCE, Entry, Message, ModelCall, Story, Thought, ToolUse

SCHEMA_VERSION = "ATIF-v1.7"


def to_atif(story: Story) -> Json:
    """Return the trajectory."""
    steps = _Steps(story)
    for entry in story.entries:
        steps.take(entry)
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": story.session_id or "unknown",
        "agent": {"name": story.agent, "version": story.version, "model_name": story.model},
        "steps": steps.finished(),
        "final_metrics": _final_metrics(story, len(steps.steps)),
        "extra": {
            "provenance": PROVENANCE,
            "outcome": story.outcome,
            "detail": story.detail,
            "gaps": [{"code": gap.code, "detail": gap.detail} for gap in story.gaps],
        },
    }


class _Steps:
    def __init__(self, story: Story) -> None:
        self._root = story.root
        self.steps: list[Json] = []
        self._open: dict[str, Json] = {}
        self._holds: dict[int, set[str]] = {}
        if story.prompt:
            self._add(None, "user", message=story.prompt)

    def take(self, entry: Entry) -> None:
        """Put an entry into the step of its invocation, or begin one."""
        if isinstance(entry, ModelCall):
            if not entry.error:
                self._open[entry.invocation] = self._answer(entry)
            return
        if isinstance(entry, Message) and (entry.final or entry.role != "assistant"):
            self._open.pop(entry.invocation, None)
            source = "agent" if entry.role == "assistant" else "user" if entry.role == "user" else "system"
            counted: Json = {"llm_call_count": 0} if source == "agent" else {}
            self._add(entry, source, message=entry.text, **counted)
            return
        step = self._step_for(entry)
        if isinstance(entry, Message):
            step["message"] = "\n".join(part for part in (step["message"], entry.text) if isinstance(part, str) and part)
        elif isinstance(entry, Thought):
            known = step.get("reasoning_content")
            step["reasoning_content"] = f"{known}\n{entry.text}" if known else entry.text
        else:
            _put(step, entry)

    def finished(self) -> list[Json]:
        """Return the steps; a trajectory has at least one."""
        if not self.steps:
            self._add(None, "system", message="The evidence holds no step.")
        return self.steps

    def _step_for(self, entry: Message | Thought | ToolUse) -> Json:
        """Return the step that is open, or a new one: after calls, the next thought, word or call is another answer's."""
        step = self._open.get(entry.invocation)
        by_agent = isinstance(entry, ToolUse) and not entry.by_model
        together = by_agent or (isinstance(entry, ToolUse) and entry.with_the_last)
        if step is None or (not together and "tool_calls" in step) or (not by_agent and step.get("llm_call_count") == 0):
            counted: Json = {"llm_call_count": 0} if by_agent else {}
            step = self._open[entry.invocation] = self._add(entry, "agent", message="", **counted)
        return step

    def _answer(self, call: ModelCall) -> Json:
        metrics: Json = {
            "prompt_tokens": call.usage.get("input_tokens"),
            "completion_tokens": call.usage.get("output_tokens"),
            "cached_tokens": call.usage.get("cached_tokens"),
            "extra": {
                "reasoning_tokens": call.usage.get("reasoning_tokens"),
                "seconds": call.seconds,
                "finish_reason": call.finish_reason,
                "response_id": call.response_id,
            },
        }
        return self._add(call, "agent", message="", model_name=call.model or "unknown", metrics=metrics, llm_call_count=1)

    def _add(self, entry: Entry | None, source: str, **fields: object) -> Json:
        step: Json = {"step_id": len(self.steps) + 1, "source": source, **fields}
        if entry is not None:
            step["timestamp"] = datetime.fromtimestamp(entry.at, UTC).isoformat()
            step["extra"] = {"invocation_id": entry.invocation}
        self.steps.append(step)
        return step


def _put(step: Json, use: ToolUse) -> None:
    """Put a call and its result into a step."""
    extra: Json = {"status": use.status, "by_model": use.by_model}
    extra |= {"parent_tool_call_id": use.parent} if use.parent else {}
    calls = step.setdefault("tool_calls", [])
    assert isinstance(calls, list)  # noqa: S101 (made here)
    given = _arguments(use.arguments)
    calls.append({"tool_call_id": use.id, "function_name": use.name, "arguments": given, "extra": extra})
    if use.output is not None:
        observation = step.setdefault("observation", {"results": []})
        assert isinstance(observation, dict)  # noqa: S101 (made here)
        observation["results"].append({"source_call_id": use.id, "content": use.output})


def _arguments(given: str) -> Json:
    try:
        parsed = json.loads(given or "{}")
    except (ValueError, RecursionError):
        parsed = None
    return mapping(parsed) if isinstance(parsed, dict) else {"arguments": given}


def _final_metrics(story: Story, steps: int) -> Json:
    def total(name: str) -> int | None:
        known = [call.usage.get(name) for call in story.answered]
        return None if any(value is None for value in known) else sum(value or 0 for value in known)

    return {
        "total_prompt_tokens": total("input_tokens"),
        "total_completion_tokens": total("output_tokens"),
        "total_cached_tokens": total("cached_tokens"),
        "total_steps": steps,
        "extra": {"model_calls": len(story.answered), "failed_model_calls": len(story.calls) - len(story.answered)},
    }
