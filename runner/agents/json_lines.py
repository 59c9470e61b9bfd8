# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What parsers of JSON lines have in common: reading a line, and saying what a call and its result were.

It refuses to drop a line: one that nobody understands is kept as it is, and named by a gap.
"""

from __future__ import annotations

import json

from boxstrap.runner.agents import Event
from boxstrap.runner.wire import Kind

KEPT_MAX = 65536
"""Bytes of a line that is kept because nobody understood it."""


def read(line: bytes) -> dict[str, object]:
    """Return the line's object, or an empty one when it holds none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def unknown(line: bytes, code: str = "unknown_event") -> list[Event]:
    """Keep a line that could not be understood, and say so."""
    log = {"stream": "stdout", "text": line[:KEPT_MAX].decode("utf-8", "replace")}
    return [(Kind.LOG, log), (Kind.GAP, {"code": code, "bytes": len(line)})]


def call(call_id: str, name: str, arguments: object) -> Event:
    """Say that the agent called a tool."""
    return Kind.TOOL_CALL, {"tool_call_id": call_id, "tool_name": name, "arguments": arguments}


def result(call_id: str, name: str, output: str, status: str = "completed") -> Event:
    """Say what a tool answered. `status` is completed, failed or incomplete."""
    return Kind.TOOL_RESULT, {"tool_call_id": call_id, "tool_name": name, "output": output, "status": status}


def message(text: str) -> Event:
    """Say what the assistant said."""
    return Kind.MESSAGE, {"role": "assistant", "text": text}


def reasoning(text: str) -> Event:
    """Say what the model thought."""
    return Kind.REASONING, {"text": text}


def text_of(value: object) -> str:
    """Return a text as it is, and anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
