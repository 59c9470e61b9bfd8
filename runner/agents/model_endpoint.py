# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""One model endpoint over httpx: every retry of an agent process happens here, under a bound that is known beforehand.

A call is sent at most 1 + max_retries times, each for at most timeout_s; between two tries lie 0.5 s, 1 s, 2 s, … (at most
30 s, give or take a quarter) or what Retry-After asks for (at most 120 s). Only what may pass is tried again: connection
errors, timeouts, 408, 425, 429, 5xx, a body that breaks off or cannot be read, a response that says it failed. It refuses to
send one call more once the policy budget is spent or the model has failed for good.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import certifi
import httpx

from boxstrap.runner.agents.event_writer import clip
from boxstrap.runner.wire import Model

FIRST_DELAY_S, DELAY_MAX_S, RETRY_AFTER_MAX_S, CONNECT_MAX_S = 0.5, 30.0, 120.0, 30.0
PAYLOAD_MAX = 64 * 1024
"""Bytes of a request or response that one event carries; what is longer is named by size and sha256, with head and tail."""
_TRANSIENT = frozenset({408, 425, 429})
_BUDGET_CODE = "policy_budget_exhausted"
_TOO_LONG = ("context_length_exceeded", "maximum context length", "context window", "prompt is too long")
_PATHS = {"responses": "/responses", "chat": "/chat/completions"}


class ModelFailedError(BaseException):
    """The model failed for good. No Exception: NOOA would ask ten times more."""


class PolicyBudgetExhaustedError(BaseException):
    """The call would be one more than max_policy_calls. No Exception, for the same reason."""


class ContextWindowExceededError(Exception):
    """The prompt is longer than the model takes. NOOA knows it by this name, archives and asks again."""


@dataclass(frozen=True)
class Problem:
    """Why a try gave no answer. `transient` tells that another may; `retry_after` is in seconds."""

    text: str
    status: int | None = None
    transient: bool = False
    retry_after: float | None = None
    kind: type[BaseException] = ModelFailedError
    cause: BaseException | None = None


class ModelEndpoint:
    """POSTs bodies and returns replies. `report` gets one account of every try, for the evidence."""

    def __init__(self, model: Model, *, max_calls: int | None, report: Callable[[dict[str, object]], None]) -> None:
        self.name = model.name
        self.dialect = model.api
        self.calls = 0
        self.last_problem: Problem | None = None
        """Of the last call, when it got no answer: it vetoes success. A prompt that is too long is no failure of the model."""
        self.tokens_per_byte = 0.25
        """What the last answer's usage says of a request body; a guess before the first."""
        self._model = model
        self._max_calls = max_calls
        self._report = report
        self._final: BaseException | None = None
        self._jitter = random.SystemRandom()  # a cell may have seeded the shared one
        self._url = model.url.rstrip("/") + _PATHS[model.api]
        self._http = httpx.AsyncClient(
            verify=_tls() if self._url.startswith("https") else False,
            trust_env=False,  # the task's proxies and .netrc are the task's
            timeout=httpx.Timeout(None, connect=min(CONNECT_MAX_S, model.timeout_s)),
            limits=httpx.Limits(max_keepalive_connections=4, keepalive_expiry=4.0),
            headers={"content-type": "application/json", "accept": "application/json", **model.headers},
        )

    async def post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to this body.

        Raises:
            PolicyBudgetExhaustedError: nothing was sent.
            ModelFailedError: for good; its __cause__ says why. Every later call raises it again and sends nothing.
            ContextWindowExceededError: the model says that the prompt is too long.
        """
        if self._final is not None:
            raise self._final
        if self._max_calls is not None and self.calls >= self._max_calls:
            self._final = PolicyBudgetExhaustedError(f"max_policy_calls is {self._max_calls}, all are used")
            raise self._final
        self.calls += 1
        raw = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        account: dict[str, object] = {"seq": self.calls, "dialect": self.dialect, "model": self.name, "request_bytes": len(raw)}
        account["request_sha256"] = hashlib.sha256(raw).hexdigest()
        error: BaseException = ModelFailedError("max_retries is negative")
        for attempt in range(self._model.max_retries + 1):
            first = attempt == 0
            reply, problem = await self._try(raw, {**account, "attempt": attempt, "retry": not first}, body if first else None)
            self.last_problem = problem if problem is None or problem.kind is ModelFailedError else None
            if problem is None:
                tokens = (usage_of(reply) or {}).get("input_tokens")
                self.tokens_per_byte = tokens / len(raw) if tokens else self.tokens_per_byte
                return reply
            error = problem.kind(problem.text if first else f"{problem.text} (tried {attempt + 1} times)")
            error.__cause__ = problem.cause
            if not problem.transient or attempt == self._model.max_retries:
                break
            await asyncio.sleep(self._pause(attempt, problem.retry_after))
        if not isinstance(error, Exception):
            self._final = error
        raise error

    def _pause(self, attempt: int, retry_after: float | None) -> float:
        if retry_after is not None:
            return min(retry_after, RETRY_AFTER_MAX_S)
        return min(FIRST_DELAY_S * 2.0**attempt, DELAY_MAX_S) * self._jitter.uniform(0.75, 1.25)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _try(
        self, raw: bytes, account: dict[str, object], body: Mapping[str, Any] | None
    ) -> tuple[dict[str, Any], Problem | None]:
        started, clock = time.time(), time.monotonic()
        answer, status, problem, cancelled = b"", None, None, True
        reply: dict[str, Any] = {}
        try:
            async with asyncio.timeout(self._model.timeout_s):
                response = await self._http.post(self._url, content=raw)
            answer, status = response.content, response.status_code
            reply, problem = _judge(self.dialect, response)
            cancelled = False
        except TimeoutError as error:
            problem = Problem(f"the model did not answer within {self._model.timeout_s:g} s", transient=True, cause=error)
            cancelled = False
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            transient = not isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL)
            problem = Problem(f"{type(error).__name__}: {error or 'no further word'}", transient=transient, cause=error)
            cancelled = False
        finally:
            account |= {"status": status, "started_at": started, "seconds": round(time.monotonic() - clock, 6)}
            account |= {"error": "cancelled" if cancelled else problem.text if problem else None}
            account |= {"usage": usage_of(reply), "finish_reason": finish_of(reply), "response_id": reply.get("id")}
            account["response_bytes"] = len(answer)
            if body is not None:
                account["request"] = _bounded(raw, body)
            if answer:
                account["response"] = _bounded(answer, reply or None)
            self._report(account)
        return reply, problem


def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certifi.where())
    context.set_default_verify_paths()  # also SSL_CERT_FILE and SSL_CERT_DIR, for an authority of one's own
    return context


def _judge(dialect: str, response: httpx.Response) -> tuple[dict[str, Any], Problem | None]:
    """Tell an answer from a problem."""
    status = response.status_code
    try:
        reply = json.loads(response.content)
    except ValueError:
        reply = None
    if status != httpx.codes.OK:
        error = reply.get("error") if isinstance(reply, dict) else None
        text = f"HTTP {status}: {clip(json.dumps(error) if error else response.text, 600)}"
        code = error.get("code") if isinstance(error, dict) else None
        if code == _BUDGET_CODE:
            return {}, Problem(text, status, kind=PolicyBudgetExhaustedError)
        if status in {400, 413, 422} and any(sign in text.lower() for sign in _TOO_LONG):
            return {}, Problem(text, status, kind=ContextWindowExceededError)
        transient = status in _TRANSIENT or status >= httpx.codes.INTERNAL_SERVER_ERROR
        return {}, Problem(text, status, transient, _seconds(response.headers.get("retry-after")))
    if not isinstance(reply, dict) or not _has_answer(dialect, reply):
        if isinstance(reply, dict) and reply.get("status") == "failed":
            return {}, Problem(f"the model says it failed: {clip(json.dumps(reply.get('error')), 600)}", status, transient=True)
        found = clip(response.content[:200].decode("utf-8", "backslashreplace"), 200)
        return {}, Problem(f"HTTP 200 with what is no {dialect} answer: {found!r}", status, transient=True)
    return reply, None


def _has_answer(dialect: str, reply: Mapping[str, Any]) -> bool:
    if dialect == "responses":
        return reply.get("status") != "failed" and isinstance(reply.get("output"), list)
    choices = reply.get("choices")
    return isinstance(choices, list) and bool(choices) and isinstance(choices[0].get("message"), dict)


def _seconds(retry_after: str | None) -> float | None:
    """Read a Retry-After header: seconds or a date."""
    if not retry_after:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return None


def usage_of(reply: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the token counts of either dialect under one set of names; None when the reply has none."""
    usage = reply.get("usage")
    if not isinstance(usage, dict):
        return None
    taken = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
    given = usage.get("output_tokens_details") or usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage.get("input_tokens") or usage.get("prompt_tokens") or 0,
        "output_tokens": usage.get("output_tokens") or usage.get("completion_tokens") or 0,
        "reasoning_tokens": given.get("reasoning_tokens") or 0,
        "cached_tokens": taken.get("cached_tokens") or 0,
    }


def finish_of(reply: Mapping[str, Any]) -> str | None:
    """Return why the model stopped, in the dialect's own word."""
    if "choices" in reply:
        reason = reply["choices"][0].get("finish_reason")
        return None if reason is None else str(reason)
    if reply.get("status") == "incomplete":
        return str((reply.get("incomplete_details") or {}).get("reason") or "incomplete")
    return None if "status" not in reply else str(reply["status"])


def _bounded(raw: bytes, parsed: Mapping[str, Any] | None) -> object:
    if len(raw) <= PAYLOAD_MAX and parsed is not None:
        return parsed
    return {"clipped": clip(raw.decode("utf-8", "backslashreplace"), PAYLOAD_MAX // 2)}
