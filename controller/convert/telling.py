# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""From events to a story.

Where a whole reply of the model is in the evidence, the model's words are taken from there (ids and token ids included),
otherwise from what the agent said of itself. It refuses to believe: every value is read for what it is, and what does not fit
is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping

from boxstrap.controller.convert import replies
from boxstrap.controller.convert.reading import Json, count, listing, mapping, number, shown, text
from boxstrap.controller.convert.story import ROOT, Gap, Invocation, Message, ModelCall, Story, Thought, ToolUse
from boxstrap.runner.wire import Event, Kind


def story_of(events: Iterable[Event], *, request: Mapping[str, object] | None = None, result: object = None) -> Story:
    """Tell the story of a session's evidence.

    Args:
        events: what `collect.read_events` yields.
        request: request.json as it was sent: its prompt is the first word of the story.
        result: result.json as plain JSON: the outcome, the receipt, and the collector's gaps.
    """
    teller = _Teller(list(events), mapping(request), mapping(result))
    return teller.tell()


class _Teller:
    def __init__(self, events: list[Event], request: Json, result: Json) -> None:
        self._events = events
        self._story = Story(
            session_id=text(request.get("session_id")),
            agent=text(request.get("agent"), "unknown"),
            prompt=text(request.get("prompt")),
            outcome=text(result.get("outcome")),
            detail=text(result.get("detail")),
            receipt=mapping(result.get("receipt")),
        )
        for gap in map(mapping, listing(result.get("gaps"))):
            self._story.gaps.append(Gap(code=text(gap.get("code"), "gap"), detail=text(gap.get("detail"))))
        self._uses: dict[str, ToolUse] = {}
        self._told: set[tuple[str, str]] = set()
        # An agent that tells nothing itself is known by its model's replies alone.
        self._mute = not any(event.kind in {Kind.MESSAGE, Kind.TOOL_CALL, Kind.REASONING} for event in events)
        self._said = {text(event.data.get("text")).strip() for event in events if event.kind == Kind.MESSAGE}
        self._called = {text(event.data.get("tool_call_id")) for event in events if event.kind == Kind.TOOL_CALL}

    def tell(self) -> Story:
        handlers: dict[str, Callable[[float, Json], None]] = {
            Kind.AGENT_STARTED: self._started,
            Kind.MODEL_CALL: self._model_call,
            Kind.REASONING: self._reasoning,
            Kind.MESSAGE: self._message,
            Kind.TOOL_CALL: self._tool_call,
            Kind.TOOL_RESULT: self._tool_result,
            Kind.PYTHON_EXECUTION: self._cell,
            Kind.RESOURCE_CALL: self._resource_call,
            Kind.LOG: self._log,
            Kind.GAP: self._gap,
            Kind.AGENT_EXITED: self._exited,
        }
        for event in _in_order(self._events):
            handler = handlers.get(event.kind)
            if handler is not None:
                handler(number(event.t) or 0.0, event.data)
        self._close()
        return self._story

    def _close(self) -> None:
        story = self._story
        for entry in story.entries:
            if entry.invocation and entry.invocation not in story.invocations:
                story.invocations[entry.invocation] = Invocation(id=entry.invocation)
        if not story.invocations:
            story.invocations[ROOT] = Invocation(id=ROOT)
        root = story.root
        for entry in [*story.entries, *story.summaries]:
            entry.invocation = entry.invocation or root

    def _started(self, _: float, data: Json) -> None:
        self._story.agent = text(data.get("agent"), self._story.agent)

    def _exited(self, _: float, data: Json) -> None:
        self._story.outcome = self._story.outcome or text(data.get("status"))
        self._story.detail = self._story.detail or text(data.get("detail"))
        self._story.result = mapping(data.get("result"))

    def _gap(self, _: float, data: Json) -> None:
        gap = Gap(code=text(data.get("code"), "gap"), detail=text(data.get("detail")), invocation=_owner(data))
        self._story.gaps.append(gap)

    def _log(self, at: float, data: Json) -> None:
        name = data.get("name")
        if name == "invocation" and _owner(data):
            self._story.invocations[_owner(data)] = Invocation(
                id=_owner(data),
                parent=text(data.get("parent_invocation_id")),
                method=text(data.get("method")),
                status=text(data.get("status"), "unknown"),
                seconds=number(data.get("seconds")),
            )
        elif name == "agent":
            self._story.version = text(data.get("version"), "unknown")
        elif name == "Summary":
            summary = Message(at=at, invocation=_owner(data), role="system", text=text(data.get("text")))
            self._story.summaries.append(summary)

    def _model_call(self, at: float, data: Json) -> None:
        usage = mapping(data.get("usage"))
        call = ModelCall(
            at=at,
            invocation=_owner(data),
            seq=count(data.get("seq")) or 0,
            model=text(data.get("model")),
            dialect=text(data.get("dialect")),
            error=text(data.get("error")) or ("" if data.get("status") == 200 else f"status {data.get('status')}"),
            response_id=text(data.get("response_id")),
            finish_reason=text(data.get("finish_reason")),
            usage={key: known for key, value in usage.items() if (known := count(value)) is not None},
            seconds=number(data.get("seconds")),
            request=mapping(data.get("request")),
        )
        self._story.entries.append(call)
        items = [] if call.error else replies.items_of(mapping(data.get("response")), key=f"{call.seq:04d}")
        if self._mute or call.invocation or all(map(self._is_told, items)):
            for item in items:
                self._item(call, item)

    def _is_told(self, item: Json) -> bool:
        """Tell whether the agent tells of the same: only then do its words and the model's belong together."""
        if item["type"] == "function_call":
            return text(item["call_id"]) in self._called
        return item["type"] == "reasoning" or replies.text_of(item).strip() in self._said

    def _item(self, call: ModelCall, item: Json) -> None:
        """Take one output item of a whole reply, in the form that the Responses dialect has."""
        kind, said, owner = item["type"], replies.text_of(item), call.invocation
        if kind == "function_call":
            told: Json = {"tool_name": item["name"], "invocation_id": owner}
            use = self._use(call.at, told, id=text(item["call_id"]), arguments=text(item["arguments"]))
            use.item = item
        elif kind == "reasoning":
            self._story.entries.append(Thought(at=call.at, invocation=owner, text=said, item=item))
        else:
            self._story.entries.append(Message(at=call.at, invocation=owner, role="assistant", text=said, item=item))
        self._told.add((str(kind), said.strip()))

    def _reasoning(self, at: float, data: Json) -> None:
        said = text(data.get("text"))
        if ("reasoning", said.strip()) not in self._told:
            self._story.entries.append(Thought(at=at, invocation=_owner(data), text=said))

    def _message(self, at: float, data: Json) -> None:
        said, final = text(data.get("text")), data.get("final") is True
        if final or ("message", said.strip()) not in self._told:
            role = text(data.get("role"), "assistant")
            self._story.entries.append(Message(at=at, invocation=_owner(data), role=role, text=said, final=final))

    def _tool_call(self, at: float, data: Json) -> None:
        name = text(data.get("tool_call_id"))
        use = self._uses.get(name)
        if use is not None and use.item is not None and use.output is None:  # the model's reply told of it
            use.started_at = number(data.get("started_at"))
            use.invocation = use.invocation or _owner(data)
        else:  # some servers use an id again
            self._use(at, data, id=name or f"call_{len(self._uses):04d}", arguments=_arguments(data.get("arguments")))

    def _tool_result(self, at: float, data: Json) -> None:
        name = text(data.get("tool_call_id"))
        use = self._uses.get(name)
        if use is None:  # a result without a call: the agent's story has a hole
            use = self._use(at, data, id=name or f"call_{len(self._uses):04d}", arguments="{}")
        use.end(data, shown(data.get("output")))

    def _cell(self, at: float, data: Json) -> None:
        """Take a cell that no model asked for; those that one asked for are tool calls already."""
        name = text(data.get("tool_call_id")) or text(data.get("execution_id"))
        if name and name not in self._uses:
            call: Json = {**data, "tool_name": "execute_python"}
            use = self._use(at, call, id=name, arguments=json.dumps({"code": text(data.get("code"))}), by_model=False)
            parts = [text(data.get(part)) for part in ("stdout", "stderr", "error")]
            use.end(data, "\n".join(part for part in parts if part))

    def _resource_call(self, at: float, data: Json) -> None:
        name = text(data.get("call_id")) or f"resource_{len(self._uses):04d}"
        use = self._use(at, data, id=name, arguments=_arguments(data.get("arguments")), by_model=False)
        use.parent = text(data.get("parent_tool_call_id"))
        use.error = text(data.get("error_type"))
        use.end(data, shown(data.get("output")))

    def _use(self, at: float, data: Json, *, id: str, arguments: str, by_model: bool = True) -> ToolUse:  # noqa: A002
        name = text(data.get("tool_name"), "unknown")
        use = ToolUse(at=at, invocation=_owner(data), id=id, name=name, arguments=arguments, by_model=by_model)
        use.started_at = number(data.get("started_at"))
        before = self._story.entries[-1] if self._story.entries else None
        if by_model and isinstance(before, ToolUse) and before.by_model:
            use.with_the_last = before.output is None and before.invocation == use.invocation
        self._uses[use.id] = use
        self._story.entries.append(use)
        return use


def _owner(data: Json) -> str:
    return text(data.get("invocation_id"))


def _arguments(value: object) -> str:
    """Return arguments as the Responses dialect has them: one string of JSON."""
    return text(value) if isinstance(value, str) else json.dumps(mapping(value), ensure_ascii=False)


def _in_order(events: list[Event]) -> list[Event]:
    """Put each model call before what came of it: the gateway and the agent write through pipes of their own."""
    ordered: list[Event] = []
    after = 0
    for event in events:
        place = len(ordered)
        if event.kind == Kind.MODEL_CALL:
            items = replies.items_of(mapping(event.data.get("response")), key="")
            ids = {item.get("call_id") for item in items} - {None}
            told = {(item["type"], replies.text_of(item).strip()) for item in items if item["type"] != "function_call"}
            early = (at for at in range(after, place) if _comes_of(ordered[at], ids, told))
            place = next(early, place)
            after = place + 1
        ordered.insert(place, event)
    return ordered


def _comes_of(event: Event, ids: set[object], told: set[tuple[object, str]]) -> bool:
    if event.kind == Kind.TOOL_CALL:
        return text(event.data.get("tool_call_id")) in ids
    return event.kind in {Kind.MESSAGE, Kind.REASONING} and (event.kind, text(event.data.get("text")).strip()) in told
