# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The session's gateway over httpx: every retry of an agent process happens here, under a bound that is known beforehand.

A call is sent at most 1 + max_retries times, each for at most timeout_s; between two tries lie 0.5 s, 1 s, 2 s, … (at most
30 s, give or take a quarter) or what Retry-After asks for (at most 120 s). Only what may pass is tried again: connection
errors, timeouts, 408, 425, 429, 5xx, a body that breaks off or cannot be read, a response that says it failed. Accounts and
the policy budget are the gateway's. It refuses to send one call more once the budget is spent or the model has failed for good.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from boxstrap.runner.agents.event_writer import clip
from boxstrap.runner.dialects import CALL_HEADER, INVOCATION_HEADER, has_answer, is_too_long, is_transient, usage_of
from boxstrap.runner.frames import PATHS
from boxstrap.runner.wire import BUDGET_CODE, PATIENCE_S, RETRY_AFTER_MAX_S, Model

CONNECT_MAX_S = 30.0


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
    """POSTs bodies and returns replies.

    `owner` tells on whose behalf a call is made, for the gateway's record; `on_reply` gets each answer and its call's number.
    """

    def __init__(
        self,
        model: Model,
        *,
        owner: Callable[[], str | None] = lambda: None,
        on_reply: Callable[[Mapping[str, object], int | None], None] = lambda reply, seq: None,
    ) -> None:
        self.name = model.name
        self.dialect = model.api
        self.last_problem: Problem | None = None
        """Of the last call, when it got no answer: it vetoes success. A prompt that is too long is no failure of the model."""
        self.tokens_per_byte = 0.25
        """What the last answer's usage says of a request body; a guess before the first."""
        self._model = model
        self._owner, self._on_reply = owner, on_reply
        self._final: BaseException | None = None
        self._jitter = random.SystemRandom()  # a cell may have seeded the shared one
        self._url = model.url.rstrip("/") + PATHS[model.api]
        self._http = httpx.AsyncClient(
            verify=False,  # noqa: S501 (loopback: TLS is the gateway's, and a context costs start-up time)
            trust_env=False,  # the task's proxies and .netrc are the task's
            timeout=httpx.Timeout(None, connect=min(CONNECT_MAX_S, model.timeout_s)),
            limits=httpx.Limits(max_keepalive_connections=4, keepalive_expiry=4.0),
            headers={"content-type": "application/json", "accept": "application/json", **model.headers},
        )

    async def post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to this body.

        Raises:
            PolicyBudgetExhaustedError: the gateway says that the budget is used; it sent nothing.
            ModelFailedError: for good; its __cause__ says why. Every later call raises it again and sends nothing.
            ContextWindowExceededError: the model says that the prompt is too long.
        """
        if self._final is not None:
            raise self._final
        raw = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        error: BaseException = ModelFailedError("max_retries is negative")
        for attempt in range(self._model.max_retries + 1):
            reply, problem = await self._try(raw)
            self.last_problem = problem if problem is None or problem.kind is ModelFailedError else None
            if problem is None:
                tokens = (usage_of(reply) or {}).get("input_tokens")
                self.tokens_per_byte = tokens / len(raw) if tokens else self.tokens_per_byte
                return reply
            error = problem.kind(problem.text if attempt == 0 else f"{problem.text} (tried {attempt + 1} times)")
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
        return self._model.pause_s(attempt) * self._jitter.uniform(0.75, 1.25)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _try(self, raw: bytes) -> tuple[dict[str, Any], Problem | None]:
        owner = self._owner()
        bound = self._model.timeout_s + PATIENCE_S
        try:
            async with asyncio.timeout(bound):
                response = await self._http.post(self._url, content=raw, headers={INVOCATION_HEADER: owner} if owner else None)
        except TimeoutError as error:
            return {}, Problem(f"the gateway did not answer within {bound:g} s", transient=True, cause=error)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            transient = not isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL)
            return {}, Problem(f"{type(error).__name__}: {error or 'no further word'}", transient=transient, cause=error)
        reply, problem = _judge(self.dialect, response)
        if problem is None:
            seq = response.headers.get(CALL_HEADER, "")
            self._on_reply(reply, int(seq) if seq.isdigit() else None)
        return reply, problem


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
        if isinstance(error, dict) and code == BUDGET_CODE:
            return {}, Problem(str(error.get("message")), status, kind=PolicyBudgetExhaustedError)
        if is_too_long(status, text):
            return {}, Problem(text, status, kind=ContextWindowExceededError)
        return {}, Problem(text, status, is_transient(status), _seconds(response.headers.get("retry-after")))
    if not isinstance(reply, dict) or not has_answer(dialect, reply):
        if isinstance(reply, dict) and reply.get("status") == "failed":
            return {}, Problem(f"the model says it failed: {clip(json.dumps(reply.get('error')), 600)}", status, transient=True)
        found = clip(response.content[:200].decode("utf-8", "backslashreplace"), 200)
        return {}, Problem(f"HTTP 200 with what is no {dialect} answer: {found!r}", status, transient=True)
    return reply, None


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
