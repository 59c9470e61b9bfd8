# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A model's whole reply, of any dialect, as output items of the Responses dialect.

Items of the Responses dialect pass as they are, with whatever a training server put on them (token ids, log probabilities). It
refuses a reply in part: one that was clipped, or that holds something else, has no items at all.
"""

from __future__ import annotations

import json

from boxstrap.controller.convert.reading import Json, content_text, listing, mapping, text


def items_of(reply: Json, *, key: str) -> list[Json]:
    """Return the reply's items; `key` makes up ids where a dialect has none. Empty when the reply is not whole."""
    if "output" in reply:
        items = [mapping(item) for item in listing(reply["output"])]
        return items if all(map(_is_item, items)) else []
    if "choices" in reply:
        message = mapping(mapping(next(iter(listing(reply["choices"])), None)).get("message"))
        items = _from_chat(message, key)
    else:
        items = _from_messages(listing(reply.get("content")), key)
    return items if all(map(_is_item, items)) else []


def text_of(item: Json) -> str:
    """Return the text of a message or a reasoning item."""
    return content_text(item.get("content")) or content_text(item.get("summary"))


def reasoning(said: str, key: str) -> Json:
    """Make a reasoning item."""
    content = [{"type": "reasoning_text", "text": said}]
    return {"type": "reasoning", "id": f"rs_{key}", "summary": [], "content": content}


def message(said: str, key: str, *, status: str = "completed") -> Json:
    """Make a message of the assistant."""
    content = [{"type": "output_text", "text": said, "annotations": []}]
    return {"type": "message", "id": f"msg_{key}", "role": "assistant", "status": status, "content": content}


def function_call(call_id: str, name: str, arguments: str, *, status: str = "completed") -> Json:
    """Make a call of a function."""
    ids = {"id": f"fc_{call_id}", "call_id": call_id}
    return {"type": "function_call", **ids, "name": name, "arguments": arguments, "status": status}


def _from_chat(said: Json, key: str) -> list[Json]:
    items: list[Json] = []
    thought = text(said.get("reasoning_content")) or text(said.get("reasoning"))
    if thought:
        items.append(reasoning(thought, key))
    if words := content_text(said.get("content")):
        items.append(message(words, key))
    for call in map(mapping, listing(said.get("tool_calls"))):
        function = mapping(call.get("function"))
        items.append(function_call(text(call.get("id")), text(function.get("name")), text(function.get("arguments"))))
    return items


def _from_messages(blocks: list[object], key: str) -> list[Json]:
    items: list[Json] = []
    for number, block in enumerate(map(mapping, blocks)):
        kind, name = block.get("type"), f"{key}_{number}"
        if kind == "thinking":
            items.append(reasoning(text(block.get("thinking")), name))
        elif kind == "text":
            items.append(message(text(block.get("text")), name))
        elif kind == "tool_use":
            given = json.dumps(mapping(block.get("input")), ensure_ascii=False)
            items.append(function_call(text(block.get("id")), text(block.get("name")), given))
        else:
            return []
    return items


def _is_item(item: Json) -> bool:
    """Tell whether an item is one that the target shapes can take, whatever wrote it."""
    kind, held = item.get("type"), [mapping(part) for part in listing(item.get("content"))]
    if kind == "function_call":
        return all(isinstance(item.get(name), str) and item[name] for name in ("call_id", "name")) and isinstance(
            item.get("arguments"), str
        )
    if not isinstance(item.get("id"), str) or any(not isinstance(part.get("text", part.get("refusal")), str) for part in held):
        return False
    kinds = {part.get("type") for part in held}
    if kind == "reasoning":
        summary = [mapping(part) for part in listing(item.get("summary"))]
        plain = all(part.get("type") == "summary_text" and isinstance(part.get("text"), str) for part in summary)
        return "summary" in item and plain and kinds <= {"reasoning_text"}
    annotated = all(isinstance(part.get("annotations", []), list) for part in held)
    return kind == "message" and item.get("role") == "assistant" and kinds <= {"output_text", "refusal"} and annotated
