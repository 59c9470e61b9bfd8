# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The three dialects of model calls, as far as a gateway must know them: their paths, and what an answer says of itself.

It refuses to change an answer: bytes are looked at, never rewritten.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from boxstrap.runner.frames import PATHS

_METHOD = {"models": "GET"}
INVOCATION_HEADER, CALL_HEADER = "x-boxstrap-invocation", "x-boxstrap-call"
"""With the first, a driver tells the gateway whose call it is; with the second, the gateway tells its number."""
JSON_MAX = 8 * 1024 * 1024
"""Bytes of an answer (or of one of its server-sent events) that are parsed; a longer one is passed on and not understood."""
_TOO_LONG = ("context_length_exceeded", "maximum context length", "context window", "prompt is too long")
_TRANSIENT = frozenset({408, 425, 429})

Reply = Mapping[str, Any]


def dialect_of(method: str, path: str, base: str) -> str | None:
    """Name the dialect of a request below `base` (the path of the model's URL) or below any …/v1; None for all else."""
    for dialect, suffix in PATHS.items():
        prefix = path.removesuffix(suffix)
        if prefix != path and (prefix == base or prefix.endswith("/v1")) and method == _METHOD.get(dialect, "POST"):
            return dialect
    return None


def is_transient(status: int) -> bool:
    """Whether the same request may succeed later (NeMo Gym's list)."""
    return status in _TRANSIENT or status >= 500


def is_too_long(status: int, text: str) -> bool:
    """Whether a refusal says that the prompt is longer than the model takes: the policy's affair, no failure of the model."""
    return status in {400, 413, 422} and any(sign in text.lower() for sign in _TOO_LONG)


def usage_of(reply: Reply) -> dict[str, int] | None:
    """Return the token counts of any dialect under one set of names; None when the reply has none.

    input_tokens holds the cached ones in every dialect: Anthropic's messages count them apart.
    """
    usage = reply.get("usage")
    if not isinstance(usage, dict):
        return None
    taken = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
    given = usage.get("output_tokens_details") or usage.get("completion_tokens_details") or {}
    apart = _count(usage.get("cache_read_input_tokens"))
    return {
        "input_tokens": _count(usage.get("input_tokens") or usage.get("prompt_tokens"))
        + apart
        + _count(usage.get("cache_creation_input_tokens")),
        "output_tokens": _count(usage.get("output_tokens") or usage.get("completion_tokens")),
        "reasoning_tokens": _count(given.get("reasoning_tokens") if isinstance(given, dict) else 0),
        "cached_tokens": _count(taken.get("cached_tokens") if isinstance(taken, dict) else 0) or apart,
    }


def finish_of(reply: Reply) -> str | None:
    """Return why the model stopped, in the dialect's own word."""
    choices = reply.get("choices")
    if isinstance(choices, list):
        reason = choices[0].get("finish_reason") if choices and isinstance(choices[0], dict) else None
        return None if reason is None else str(reason)
    if "stop_reason" in reply:
        return None if reply["stop_reason"] is None else str(reply["stop_reason"])
    if reply.get("status") == "incomplete":
        details = reply.get("incomplete_details")
        return str((details.get("reason") if isinstance(details, dict) else None) or "incomplete")
    return None if "status" not in reply else str(reply["status"])


def has_answer(dialect: str, reply: object) -> bool:
    """Whether a parsed body is an answer of its dialect, and not a page of some proxy or a failure."""
    if not isinstance(reply, dict):
        return False
    if dialect == "chat":
        choices = reply.get("choices")
        return isinstance(choices, list) and bool(choices) and isinstance(choices[0], dict) and "message" in choices[0]
    if dialect == "messages":
        return isinstance(reply.get("content"), list)
    return reply.get("status") != "failed" and isinstance(reply.get("output"), list)


class Answer:
    """Reads along as an answer's body goes by, JSON or server-sent events.

    `reply` is what it amounts to: the parsed body, the last response of a stream, or what a stream's events said of usage
    and finish. `problem` is what was wrong with it, once `end` was called: "garbage", "failed", "incomplete", or "".
    """

    def __init__(self, dialect: str, content_type: str, encoding: str) -> None:
        self._dialect = dialect
        self.streaming = content_type.partition(";")[0].strip().lower() == "text/event-stream"
        self.reply: dict[str, Any] = {}
        self.problem = ""
        self._raw = bytearray()
        self._overlong = False
        self._finished = False
        self._failed = False
        self._unzip = zlib.decompressobj(wbits=47) if encoding in {"gzip", "deflate"} else None
        self.compressed = encoding not in {"", "identity"}
        self._opaque = encoding not in {"", "identity", "gzip", "deflate"}

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        if self._opaque:
            return
        if self._unzip is not None:
            try:
                data = self._unzip.decompress(data, JSON_MAX)
            except zlib.error:
                self._opaque = True
                return
        self._raw += data
        if self.streaming and b"\n" in data:
            *lines, rest = self._raw.split(b"\n")
            self._raw = bytearray(rest)
            for line in lines:
                if line.startswith(b"data:"):
                    self._event(bytes(line[5:]).strip())
        if len(self._raw) > JSON_MAX:
            self._raw.clear()
            self._overlong = True

    def end(self) -> None:
        """Judge: the body is complete."""
        if self._opaque or self._overlong:
            return
        if self.streaming:
            if self._raw.startswith(b"data:"):
                self._event(bytes(self._raw[5:]).strip())
            self.problem = "failed" if self._failed else "" if self._finished else "incomplete"
            return
        try:
            parsed = json.loads(self._raw)
        except (ValueError, RecursionError):
            self.problem = "garbage"
            return
        if isinstance(parsed, dict):
            self.reply = parsed
        if not has_answer(self._dialect, parsed):
            self.problem = "failed" if isinstance(parsed, dict) and parsed.get("status") == "failed" else "garbage"

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._finished = True
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            return
        if not isinstance(event, dict):
            return
        kind = str(event.get("type", ""))
        if kind == "error" or (not kind and isinstance(event.get("error"), dict)):
            self._failed = True
        elif self._dialect == "responses":
            self._response_event(kind, event)
        elif self._dialect == "messages":
            self._message_event(kind, event)
        else:
            self._chunk(event)

    def _response_event(self, kind: str, event: Reply) -> None:
        response = event.get("response")
        if isinstance(response, dict) and kind in {"response.completed", "response.incomplete", "response.failed"}:
            self.reply = response
            self._finished = True
            self._failed = self._failed or kind == "response.failed"

    def _message_event(self, kind: str, event: Reply) -> None:
        message, delta = event.get("message"), event.get("delta")
        if kind == "message_start" and isinstance(message, dict):
            self.reply = {key: message[key] for key in ("id", "model", "usage") if key in message}
        elif kind == "message_delta":
            if isinstance(delta, dict) and "stop_reason" in delta:
                self.reply["stop_reason"] = delta["stop_reason"]
            if isinstance(event.get("usage"), dict):
                before = self.reply.get("usage")
                self.reply["usage"] = {**(before if isinstance(before, dict) else {}), **event["usage"]}
        elif kind == "message_stop":
            self._finished = True

    def _chunk(self, chunk: Reply) -> None:
        self.reply |= {key: chunk[key] for key in ("id", "model") if key in chunk}
        if isinstance(chunk.get("usage"), dict):
            self.reply["usage"] = chunk["usage"]
        reason = finish_of(chunk)
        if reason is not None:
            self.reply["choices"] = [{"finish_reason": reason}]
            self._finished = True


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
