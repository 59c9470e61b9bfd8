# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The two request dialects of the scripted model: count its turns, put a turn into a body, stream it, object to a body.

Shapes are those of OpenAI's Chat Completions and Responses APIs. It refuses to validate more than what NeMo Gym refuses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from model_scripts import Turn

Body = dict[str, Any]

_OURS = "call_turn_"
"""How the ids of our tool calls begin; the number of the turn follows."""
_SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_AGENTS = ("prefill_", "codeact_inline_")
"""How the ids of tool calls begin that an agent made up and put into the conversation itself."""

# The fields of nemo-gym 0.7.0's NeMoGymChatCompletionCreateParamsNonStreaming and NeMoGymResponseCreateParamsNonStreaming.
_CHAT_KEYS = frozenset(
    """
    messages model audio frequency_penalty logit_bias logprobs max_completion_tokens max_tokens metadata moderation
    modalities n parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_retention reasoning_effort
    response_format seed safety_identifier service_tier stop store stream_options temperature tool_choice tools
    top_logprobs top_p user verbosity web_search_options stream chat_template_kwargs thinking output_config
    """.split()  # noqa: SIM905 (thirty quoted names read worse)
)
_RESPONSES_KEYS = frozenset(
    """
    background include input instructions max_output_tokens max_tool_calls metadata model parallel_tool_calls
    previous_response_id prompt reasoning service_tier store context_management conversation moderation prompt_cache_key
    prompt_cache_retention safety_identifier stream_options temperature text tool_choice tools top_logprobs top_p
    truncation user stream
    """.split()  # noqa: SIM905 (thirty quoted names read worse)
)
_ITEM_NEEDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("id", "summary"),
}


def turns_taken(dialect: str, body: Body) -> int:
    """Return how often the model has answered in this conversation, also when its beginning was summarized away."""
    taken = 0
    for message in _messages(dialect, body):
        calls = [message] if message.get("type") == "function_call" else message.get("tool_calls") or []
        ids = [str(call.get("call_id") or call.get("id")) for call in calls]
        if ids and ids[0].startswith(_OURS):
            taken = int(ids[0].removeprefix(_OURS)) + 1
        elif ids or message.get("role") == "assistant":
            taken += not any(call.startswith(_AGENTS) for call in ids)
    return taken


def _messages(dialect: str, body: Body) -> list[Body]:
    messages = body.get("input" if dialect == "responses" else "messages")
    return [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []


def answer(dialect: str, body: Body, turn: Turn) -> Body:
    """Return the whole body of an answer that takes this turn with the tools that the request offers."""
    number = turns_taken(dialect, body)
    tools = {tool.get("name") or tool.get("function", {}).get("name") for tool in body.get("tools") or []}
    if turn.result and _SUBMIT in json.dumps(_messages(dialect, body)[:2]):  # mini-swe-agent says how it wants to be told
        turn = Turn(shell=f"echo {_SUBMIT}")
    call, text = _act(turn, tools)
    if schema := _wanted_schema(body):
        call, text = None, json.dumps(_instance(schema, schema))
    tokens_in, tokens_out = len(json.dumps(body)) // 4, len(json.dumps([call, text, turn.reasoning])) // 4
    reasoning_tokens = len(turn.reasoning) // 4
    name = body.get("model")
    if dialect == "responses":
        output: list[Body] = []
        if turn.reasoning:
            summary = [{"type": "summary_text", "text": turn.reasoning}]
            output.append({"type": "reasoning", "id": f"rs_{number:04d}", "summary": summary})
        if call:
            ids = {"id": f"fc_{number:04d}", "call_id": f"{_OURS}{number:04d}", "status": "completed"}
            output.append({"type": "function_call", "name": call[0], "arguments": json.dumps(call[1]), **ids})
        else:
            content = [{"type": "output_text", "text": text, "annotations": []}]
            message = {"type": "message", "role": "assistant", "status": "completed", "content": content}
            output.append({**message, "id": f"msg_{number:04d}"})
        usage: Body = {"input_tokens": tokens_in, "output_tokens": tokens_out, "total_tokens": tokens_in + tokens_out}
        usage |= {"input_tokens_details": {"cached_tokens": tokens_in // 2}}
        usage |= {"output_tokens_details": {"reasoning_tokens": reasoning_tokens}}
        common = {"object": "response", "status": "completed", "model": name, "created_at": 0, "error": None}
        more = {"tools": body.get("tools") or [], "tool_choice": "auto", "parallel_tool_calls": False}
        return {"id": f"resp_{number:04d}", **common, **more, "output": output, "usage": usage}
    reply: Body = {"role": "assistant", "content": None if call else text}
    if turn.reasoning:
        reply["reasoning_content"] = turn.reasoning
    if call:
        function = {"name": call[0], "arguments": json.dumps(call[1])}
        reply["tool_calls"] = [{"id": f"{_OURS}{number:04d}", "type": "function", "function": function}]
    usage = {"prompt_tokens": tokens_in, "completion_tokens": tokens_out, "total_tokens": tokens_in + tokens_out}
    usage |= {"prompt_tokens_details": {"cached_tokens": tokens_in // 2}}
    usage |= {"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}
    choice = {"index": 0, "message": reply, "finish_reason": "tool_calls" if call else "stop"}
    return {
        "id": f"chat_{number:04d}",
        "object": "chat.completion",
        "created": 0,
        "model": name,
        "choices": [choice],
        "usage": usage,
    }


def _act(turn: Turn, tools: set[str]) -> tuple[tuple[str, Body] | None, str]:
    """Choose the tool call that takes the turn, or the text when no offered tool can."""
    if turn.result and "return_result" in tools:
        return ("return_result", {"result": dict(turn.result)}), ""
    if turn.code and "execute_python" in tools:
        return ("execute_python", {"code": turn.code}), ""
    shell = next((name for name in ("shell", "bash") if name in tools), None)
    if turn.shell and shell:
        return (shell, {"command": turn.shell, "description": "one step of the script"}), ""
    return None, turn.text or "I am only a script, and none of the offered tools takes this turn."


def _wanted_schema(body: Body) -> Body:
    """Return the JSON schema that the answer's text must have, empty when it is free."""
    chat = (body.get("response_format") or {}).get("json_schema") or {}
    responses = (body.get("text") or {}).get("format") or {}
    return chat.get("schema") or responses.get("schema") or {}


def _instance(schema: Body, root: Body) -> object:
    """Return the plainest value of a schema."""
    if "$ref" in schema:
        return _instance(root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root)
    for choice in schema.get("anyOf") or schema.get("enum") or []:
        return _instance(choice, root) if isinstance(choice, dict) else choice
    if schema.get("type") == "object":
        return {key: _instance(value, root) for key, value in schema.get("properties", {}).items()}
    return {"array": [], "integer": 0, "number": 0.0, "boolean": False, "null": None}.get(str(schema.get("type")), "scripted")


def events(dialect: str, body: Body, reply: Body) -> Iterator[str]:
    """Yield the answer as server-sent events, as the dialect's streaming form has it."""
    if dialect == "responses":
        yield from _response_events(reply)
        return
    choice = reply["choices"][0]
    delta = dict(choice["message"])
    for index, call in enumerate(delta.get("tool_calls") or []):
        call["index"] = index
    common = {key: reply[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    yield _event({**common, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield _event({**common, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    if (body.get("stream_options") or {}).get("include_usage"):
        yield _event({**common, "choices": [], "usage": reply["usage"]})
    yield "data: [DONE]\n\n"


def _response_events(reply: Body) -> Iterator[str]:
    started = {**reply, "status": "in_progress", "output": [], "usage": None}
    parts: list[Body] = [{"type": "response.created", "response": started}]
    for index, item in enumerate(reply["output"]):
        where = {"output_index": index, "item_id": item["id"]}
        parts.append({"type": "response.output_item.added", "output_index": index, "item": {**item, "status": "in_progress"}})
        if item["type"] == "function_call":
            parts.append({"type": "response.function_call_arguments.delta", **where, "delta": item["arguments"]})
            parts.append({"type": "response.function_call_arguments.done", **where, "arguments": item["arguments"]})
        if item["type"] == "message":
            text = item["content"][0]["text"]
            parts.append({"type": "response.output_text.delta", **where, "content_index": 0, "delta": text})
            parts.append({"type": "response.output_text.done", **where, "content_index": 0, "text": text})
        parts.append({"type": "response.output_item.done", "output_index": index, "item": item})
    parts.append({"type": "response.completed", "response": reply})
    for number, part in enumerate(parts):
        yield f"event: {part['type']}\n{_event({**part, 'sequence_number': number})}"


def _event(value: Body) -> str:
    return f"data: {json.dumps(value)}\n\n"


def strict_objection(dialect: str, body: Body) -> str:
    """Say why NeMo Gym's request schemas would answer 422 to this body; empty when they would not."""
    unknown = set(body) - (_RESPONSES_KEYS if dialect == "responses" else _CHAT_KEYS)
    if unknown:
        return f"extra inputs are not permitted: {', '.join(sorted(unknown))}"
    if body.get("stream"):
        return "stream: input should be false"
    messages = body.get("input" if dialect == "responses" else "messages")
    if not isinstance(messages, list) or not messages:
        return "" if isinstance(messages, str) and dialect == "responses" else "no messages"
    for number, message in enumerate(messages):
        content = message.get("content")
        for part in [message, *(content if isinstance(content, list) else [])]:
            if "cache_control" in part:
                return f"message {number}: cache_control is not permitted"
        kind = message.get("type", "message")
        needs = _ITEM_NEEDS.get(kind) if dialect == "responses" else ("role",)
        if needs is None or any(message.get(key) is None for key in needs):
            return f"message {number}: found {sorted(message)}, needed {needs or 'a known type'}"
    tools = body.get("tools") or []
    return next(
        (f"tool {number}: cache_control is not permitted" for number, tool in enumerate(tools) if "cache_control" in tool), ""
    )
