# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The account of model calls: which is new and which a retry, how many the budget still allows, what each came to.

A call is what the agent asks; the same body again after a failure is another attempt of that call and costs no budget, since
the model gave nothing for it. It refuses to count what was answered: a call is used up when it is sent; and to send a call that
has failed max_retries + 1 times once more: some agents would ask a dead model until their deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from boxstrap.runner.dialects import Answer, finish_of, is_too_long, usage_of
from boxstrap.runner.frames import PolicyBudget
from boxstrap.runner.upstream import Ask
from boxstrap.runner.wire import BUDGET_CODE, Kind

PAYLOAD_MAX = 1024 * 1024
"""Bytes of a request or response that an event carries; the evidence log moves what is too long for a line to artifacts/."""
GIVEN_UP_CODE = "model_failed"
BACKLOG_MAX = 32 * 1024 * 1024
"""Bytes of events that may wait for the supervisor; beyond it payloads are left out of the events."""


class Refusal(Exception):
    """The gateway's own no: a status, a code, and a sentence."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class EventPipe:
    """The gateway's end of its event pipe: one JSON object a line; it never makes a call wait for the supervisor."""

    def __init__(self, transport: asyncio.WriteTransport, closed: asyncio.Event) -> None:
        self._transport = transport
        self._closed = closed

    @classmethod
    async def open(cls, fd: int) -> EventPipe:
        """Take over the descriptor."""
        closed = asyncio.Event()

        class Protocol(asyncio.BaseProtocol):
            def connection_lost(self, exc: Exception | None) -> None:
                del exc
                closed.set()

        transport, _ = await asyncio.get_running_loop().connect_write_pipe(Protocol, os.fdopen(fd, "wb", buffering=0))
        return cls(transport, closed)

    @property
    def crowded(self) -> bool:
        """Whether the supervisor is far behind."""
        return self._transport.get_write_buffer_size() > BACKLOG_MAX

    def emit(self, kind: str, data: Mapping[str, object], **payloads: bytes) -> None:
        """Send one event; `payloads` are more of its data, as JSON that needs no second writing."""
        line = json.dumps({"kind": kind, "data": data}, separators=(",", ":")).encode("ascii")
        more = b"".join(b',"%b":%b' % (name.encode(), payload) for name, payload in payloads.items())
        self._transport.write(b"%b%b}}\n" % (line[:-2], more))

    async def close(self, within_s: float) -> None:
        """Send what waits, and close."""
        self._transport.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), within_s)


class Account:
    """One attempt of one call, from request to end."""

    def __init__(self, ask: Ask, *, seq: int, attempt: int, digest: str, invocation: str) -> None:
        self.seq, self.attempt, self.digest = seq, attempt, digest
        self.ask, self.invocation = ask, invocation
        self.error: str | None = None
        self.detail = ""
        self.status: int | None = None
        self.response_bytes = 0
        self.closed = False
        self._started_at, self._begun = time.time(), time.monotonic()
        self._first: float | None = None
        self._answer: Answer | None = None
        self._kept = bytearray()
        self._hash = hashlib.sha256()
        self._request: dict[str, Any] | None = None

    def read_request(self) -> dict[str, Any]:
        """Parse the request, once. Whoever does so while the model thinks has less to do when its answer comes."""
        if self._request is None:
            self._request = _parsed(self.ask.body)
        return self._request

    @property
    def counted(self) -> bool:
        """Whether this is a policy call, and no look at the list of models."""
        return self.ask.dialect != "models"

    def head(self, status: int, answer: Answer) -> None:
        """Take the answer's head."""
        self.status, self._answer = status, answer
        self._first = time.monotonic()

    def body(self, chunk: bytes) -> None:
        """Take the next bytes of the answer."""
        self.response_bytes += len(chunk)
        self._hash.update(chunk)
        if len(self._kept) < PAYLOAD_MAX:
            self._kept += chunk[: PAYLOAD_MAX - len(self._kept)]
        if self._answer is not None and self.counted:
            self._answer.feed(chunk)

    def complete(self) -> None:
        """Judge an answer that came to its end."""
        if self.status is not None and self.status >= 300:
            text = self._kept[:2000].decode("utf-8", "replace")
            self.fail("too_long" if is_too_long(self.status, text) else "http", f"HTTP {self.status}: {text[:600]}")
        elif self._answer is not None and self.counted:
            self._answer.end()
            if self._answer.problem:
                found = self._kept[:200].decode("utf-8", "backslashreplace")
                self.fail(self._answer.problem, f"HTTP {self.status}, but no whole {self.ask.dialect} answer: {found!r}")

    def fail(self, kind: str, detail: str) -> None:
        """Note what went wrong; the first word stays."""
        if self.error is None:
            self.error, self.detail = kind, detail

    def told(self) -> dict[str, object]:
        """Return the event's data, without payloads."""
        now = time.monotonic()
        body = self.read_request()
        reply: dict[str, Any] = self._answer.reply if self._answer is not None else {}
        return {
            "seq": self.seq,
            "attempt": self.attempt,
            "retry": self.attempt > 0,
            "dialect": self.ask.dialect,
            "path": self.ask.path,
            "model": body.get("model"),
            "streaming": bool(body.get("stream")),
            "status": self.status,
            "error": self.error,
            "detail": self.detail,
            "started_at": self._started_at,
            "seconds": round(now - self._begun, 6),
            "ttfb_seconds": None if self._first is None else round(self._first - self._begun, 6),
            "usage": usage_of(reply),
            "finish_reason": finish_of(reply),
            "response_id": reply.get("id"),
            "invocation_id": self.invocation or None,
            "request_bytes": len(self.ask.body),
            "request_sha256": self.digest,
            "response_bytes": self.response_bytes,
            "response_sha256": self._hash.hexdigest() if self.response_bytes else None,
        }

    def payloads(self) -> dict[str, bytes]:
        """Return request and response as JSON. A retry's request is the first one's."""
        found = {}
        if self.attempt == 0:
            found["request"] = _as_json(self.ask.body, parsed=bool(self.read_request()))
        if self.response_bytes:
            answer = self._answer
            if answer is not None and (answer.compressed or answer.streaming) and _is_whole(answer):
                found["response"] = json.dumps(answer.reply).encode()
            else:
                whole = answer is not None and bool(answer.reply) and not answer.streaming and not answer.compressed
                found["response"] = _as_json(bytes(self._kept), parsed=whole and len(self._kept) == self.response_bytes)
        return found


class Calls:
    """All calls of a session, subagents' included."""

    def __init__(self, events: EventPipe, *, max_calls: int | None, max_retries: int) -> None:
        self._events = events
        self._max_retries = max_retries
        self._budget = PolicyBudget(max_calls)

    def begin(self, ask: Ask, *, invocation: str = "") -> Account:
        """Open the account of a request that is about to be sent.

        Raises:
            Refusal: the policy budget is used, or this call has failed for good; nothing may be sent.
        """
        digest = hashlib.sha256(ask.body).hexdigest()
        if ask.dialect == "models":
            return Account(ask, seq=0, attempt=0, digest=digest, invocation=invocation)
        taken = self._budget.take(f"{ask.dialect} {digest}")
        if taken is None:
            self._events.emit("budget", {"max_policy_calls": self._budget.limit})
            raise Refusal(403, BUDGET_CODE, f"max_policy_calls is {self._budget.limit}, all are used")
        if taken[1] > self._max_retries:
            self._budget.failed(f"{ask.dialect} {digest}", *taken)
            raise Refusal(403, GIVEN_UP_CODE, f"this call has failed {taken[1]} times, and max_retries is {self._max_retries}")
        self._events.emit("begin", {"seq": taken[0]})
        return Account(ask, seq=taken[0], attempt=taken[1], digest=digest, invocation=invocation)

    def end(self, account: Account) -> None:
        """Close an account, once: write its event, and remember a failed body, so that it is known when it comes again."""
        if account.closed:
            return
        account.closed = True
        if not account.counted:
            text = f"GET {account.ask.path}: {account.status or account.detail}"
            self._events.emit(Kind.LOG, {"stream": "gateway", "text": text})
            return
        if account.error is not None:
            self._budget.failed(f"{account.ask.dialect} {account.digest}", account.seq, account.attempt + 1)
        told = account.told()
        self._events.emit(Kind.MODEL_CALL, told, **({} if self._events.crowded else account.payloads()))


def _is_whole(answer: Answer) -> bool:
    """Whether the reply that was read along is all of the answer: most streams end without it."""
    return bool(answer.reply) and (not answer.streaming or "output" in answer.reply)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _as_json(raw: bytes, *, parsed: bool) -> bytes:
    """Give a payload as one line of JSON: as it is where it was `parsed`, else its head and tail as text."""
    if parsed and len(raw) <= PAYLOAD_MAX and raw.isascii() and b"\n" not in raw and b"\r" not in raw:
        return raw
    if parsed and len(raw) <= PAYLOAD_MAX:
        return json.dumps(json.loads(raw)).encode()
    half = PAYLOAD_MAX // 16
    text = raw if len(raw) <= 2 * half else raw[:half] + b" [...] " + raw[-half:]
    return json.dumps({"clipped": text.decode("utf-8", "backslashreplace")}).encode()
