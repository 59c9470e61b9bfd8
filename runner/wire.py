# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Every shape and code that crosses the boundary between host and sandbox.

Standard library only, because it is imported on both sides. The sandbox prints these objects as JSON; the controller
reads them back with pydantic in strict mode (`__pydantic_config__` forbids unknown keys). It refuses to act: no I/O
and no defaults from the environment.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any, ClassVar

VERSION = 1
EVIDENCE_LINE_MAX = 256 * 1024
"""Bytes. A longer evidence line spills its payload into artifacts/ (DESIGN 10)."""
TAIL_CHUNK_MAX = 1024 * 1024
"""Bytes of evidence that one `tail` answers with at most."""
STOPPED_CLAIM = "stopped"
"""The claim of a session that was stopped before it began; any other is a request's digest."""
WARM_MAX_S = 1800.0
"""How long what was started early waits for its request; then it is as if nothing had been started."""
REQUEST_MAX = 16 * 1024 * 1024
"""Bytes of a request.json; the prompt is part of it."""
FIRST_PAUSE_S, PAUSE_MAX_S, RETRY_AFTER_MAX_S = 0.5, 30.0, 120.0
"""Seconds between two tries of one model call: the first pause, the longest, and the longest that a Retry-After may ask for."""
PATIENCE_S = 5.0
"""How much longer than the gateway a client of ours waits for one try: whose bound it is should say so."""
TOOLS_PATH = "/_boxstrap/tools/"
"""Below it, where the controller relays, the gateway takes calls of granted functions: <access's name>/<function's name>."""
TOOL_FAILED = "resource_unreachable"
"""The `error.code` with which the gateway says that a granted function's server gave no answer."""
BUDGET_CODE = "policy_budget_exhausted"
"""The `error.code` with which the gateway refuses a call beyond max_policy_calls; also the outcome's word."""

PUSH_BEAT_S = 2.0
"""A box that pushes its evidence says at least so often that it is still there."""
SINK_MAX = 16 * 1024
"""Bytes of a sink.json."""

_STRICT: dict[str, Any] = {"extra": "forbid", "strict": True}


class ExitStatus(IntEnum):
    """What the archive's verbs exit with. The agent's own status lives in the receipt."""

    OK = 0
    USAGE = 64
    REFUSED = 69
    BUG = 70
    INSTALL_FAILED = 73
    TRY_AGAIN = 75


class Code(StrEnum):
    """Stable names of what the box can say no with. Never renamed, never reused."""

    UNSUPPORTED_OS = "unsupported-os"
    UNSUPPORTED_ARCH = "unsupported-arch"
    UNSUPPORTED_LIBC = "unsupported-libc"
    LIBC_TOO_OLD = "libc-too-old"
    MISSING_TOOL = "missing-tool"
    NOT_WRITABLE = "not-writable"
    NOEXEC = "noexec"
    NO_SPACE = "no-space"
    NO_PYTHON = "no-python"
    LOCK_UNSUPPORTED = "lock-unsupported"
    LOCK_TIMEOUT = "lock-timeout"
    WORKDIR_MISSING = "workdir-missing"
    URL_UNREACHABLE = "url-unreachable"
    URL_LOOPBACK = "url-loopback"
    UPLOAD_CORRUPT = "upload-corrupt"
    UNSAFE_MEMBER = "unsafe-member"
    SMOKE_FAILED = "smoke-failed"
    RUNTIME_MISSING = "runtime-missing"
    SESSION_CONFLICT = "session-conflict"
    SESSION_STOPPED = "session-stopped"
    SESSION_MISSING = "session-missing"
    BAD_REQUEST = "bad-request"
    LAUNCH_FAILED = "launch-failed"
    CLEANUP_UNCONFIRMED = "cleanup-unconfirmed"
    USAGE = "usage"
    BUG = "bug"


class Kind(StrEnum):
    """The kinds of evidence events (DESIGN 10)."""

    PHASE = "phase"
    AGENT_STARTED = "agent_started"
    MESSAGE = "message"
    REASONING = "reasoning"
    TOOL_CALL = "tool_call"
    TOOL_RESULT = "tool_result"
    PYTHON_EXECUTION = "python_execution"
    RESOURCE_CALL = "resource_call"
    MODEL_CALL = "model_call"
    LOG = "log"
    HEARTBEAT = "heartbeat"
    GAP = "gap"
    AGENT_EXITED = "agent_exited"
    ENDED = "ended"


class Outcome(StrEnum):
    """How a session ended (DESIGN 12)."""

    COMPLETED = "completed"
    GAVE_UP = "gave_up"
    POLICY_BUDGET_EXHAUSTED = "policy_budget_exhausted"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    AGENT_FAILED = "agent_failed"
    MODEL_FAILED = "model_failed"
    RESOURCE_FAILED = "resource_failed"
    SETUP_FAILED = "setup_failed"
    SANDBOX_LOST = "sandbox_lost"
    CANCELLED = "cancelled"

    @property
    def gradable(self) -> bool:
        """Whether verification may turn this into a reward. Infrastructure failures never are."""
        return self in {
            Outcome.COMPLETED,
            Outcome.GAVE_UP,
            Outcome.POLICY_BUDGET_EXHAUSTED,
            Outcome.DEADLINE_EXCEEDED,
        }

    @property
    def retryable(self) -> bool:
        """Whether the same session may succeed when tried again elsewhere."""
        return self in {Outcome.MODEL_FAILED, Outcome.RESOURCE_FAILED, Outcome.SANDBOX_LOST}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One clear no: what was found and needed (message), and what to do (remedy)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    code: str
    message: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Check:
    """One precondition and how the box met it. `status` is ok, warn, fail or skip."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    code: str
    status: str
    found: str
    needed: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `check` says of a box: every check, then the judgement."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    v: int = VERSION
    refused: bool
    facts: dict[str, str]
    checks: list[Check]


@dataclass(frozen=True, kw_only=True)
class Installed:
    """What `install` says of a runtime. `state` is reused, installed or repaired."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    v: int = VERSION
    state: str
    path: str
    digest: str
    files: int
    bytes: int
    seconds: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What any verb prints with --json: exactly one of a failure, a report, an install or free data."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    v: int = VERSION
    ok: bool
    failure: Failure | None = None
    report: Report | None = None
    installed: Installed | None = None
    data: dict[str, object] | None = None


@dataclass(frozen=True, kw_only=True)
class Model:
    """Where the agent's model is, as the sandbox sees it.

    `api` is "responses" or "chat". `url` ends before the dialect's own path (…/v1). `headers` travel with every call.
    `upstream` is "direct", or "relay": the controller makes the calls, and `url` is no more than a name.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    url: str
    name: str
    api: str = "responses"
    headers: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0
    max_retries: int = 4
    upstream: str = "direct"

    def pause_s(self, attempt: int) -> float:
        """Seconds between try `attempt` (from 0) and the next, where the model asks for none: give or take a quarter."""
        return min(FIRST_PAUSE_S * 2.0**attempt, PAUSE_MAX_S)

    def failed_after_s(self, *, retry_after_s: float = 0.0) -> float:
        """Seconds after which a call by a client of ours has failed for good, if each refusal asks for `retry_after_s`."""
        tries = self.max_retries + 1
        asked = min(retry_after_s, RETRY_AFTER_MAX_S)
        pauses = sum(max(1.25 * self.pause_s(attempt), asked) for attempt in range(self.max_retries))
        return tries * (self.timeout_s + PATIENCE_S) + pauses


@dataclass(frozen=True, kw_only=True)
class ToolAccess:
    """One server whose functions the agent may call: NeMo Gym's DirectHTTPToolAccess, and the functions that it serves.

    A call is a POST of its arguments to `base_url`/<function's name>. `tools` are Responses tools ({type: "function", name,
    description, parameters}). A `required` one that fails for good fails the session. `cookies` start its own jar.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    name: str
    base_url: str
    kind: str = "direct_http"
    required: bool = True
    cookies: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    tools: list[dict[str, object]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One activation: request.json in the session folder. Its digest is what `launch.claim` names.

    `deadline_s` and `grace_s` are seconds from launch and from the first TERM. `env` is added to the agent's
    environment; nothing else of the host is. `activation` is a bash snippet run once to capture the task environment.
    `input` is what the caller was asked, in items of the Responses dialect, for agents that take more than a prompt.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    v: int = VERSION
    session_id: str
    agent: str
    workdir: str
    prompt: str
    model: Model | None = None
    deadline_s: float = 21420.0
    grace_s: float = 10.0
    activation: str = ""
    env: dict[str, str] = field(default_factory=dict)
    argv: list[str] = field(default_factory=list)
    options: dict[str, object] = field(default_factory=dict)
    max_policy_calls: int | None = None
    tool_accesses: list[ToolAccess] = field(default_factory=list)
    input: list[dict[str, object]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """A process that outlived the reaper: what /proc said of it."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    pid: int
    name: str


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """The supervisor's last word, written after the last process is gone. Agent-reported, like all evidence.

    Times are unix seconds, `cpu_seconds` is user plus system of every reaped process, `peak_rss_bytes` the largest
    single process. `status` and `detail` are what the agent itself said of its end (empty when it said nothing),
    or what its model calls make of it (runner/model_state.py).
    `supervisor_lost` tells that someone other than the session's own supervisor had to finish the work; then `unaccounted`
    are processes that started meanwhile and bear no sign of whose they are: they were left alone, and nothing is confirmed.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    v: int = VERSION
    session_id: str
    request_digest: str
    agent: str
    started_at: float | None
    ended_at: float
    exit_code: int | None
    signal: int | None
    status: str
    detail: str
    timed_out: bool
    stopped: bool
    oom_killed: bool
    supervisor_lost: bool
    cleanup_confirmed: bool
    survivors: list[Survivor]
    reaped: int
    evidence_bytes: int
    evidence_sha256: str
    stdout_bytes: int
    stderr_bytes: int
    output_truncated: bool
    peak_rss_bytes: int
    cpu_seconds: float
    unaccounted: list[Survivor] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Tail:
    """What `tail` answers: a slice of evidence.ndjson by byte offset, and where the session stands.

    `chunk` is base64 of whole lines, except that a torn last line is included once `state` is final. `state` is
    absent (no claim yet), running, ended (a receipt is there), or lost (the supervisor is dead, no receipt). `claim` is
    the digest of the request that holds the session, "stopped", or "".
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    v: int = VERSION
    start: int
    next: int
    size: int
    chunk: str
    state: str
    claim: str
    receipt: Receipt | None = None


@dataclass(frozen=True, kw_only=True)
class Sink:
    """Where a session's evidence is pushed to: sink.json in the session folder. The token is the session's alone.

    No part of the request: a controller that was restarted is found at another place, by another token.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    v: int = VERSION
    url: str
    token: str


@dataclass(frozen=True, kw_only=True)
class Acknowledged:
    """What a sink answers to a pushed Tail: the byte from which it wants to hear more. `error` says why it took nothing."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    v: int = VERSION
    next: int
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of evidence.ndjson. `t` is unix seconds, `mono` seconds of the monotonic clock."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _STRICT
    v: int = VERSION
    seq: int
    t: float
    mono: float
    kind: str
    data: dict[str, object]


SESSION_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
"""What a session id must match as a whole: it becomes a folder name."""


def to_json(value: object) -> str:
    """Print a wire object (or plain data) as one line of compact ASCII JSON; NaN is refused with ValueError."""
    plain = asdict(value) if hasattr(value, "__dataclass_fields__") else value  # type: ignore[call-overload]
    return json.dumps(plain, separators=(",", ":"), allow_nan=False)


def runtime_digest(*, interpreter: str, payload: str | None, arch: str, archive: str) -> str:
    """Name a runtime by what it is made of: sha256 (hex) over the files' sha256, the architecture and our code."""
    parts = ("boxstrap-runtime-1", interpreter, payload or "-", arch, archive)
    return hashlib.sha256("".join(f"{part}\n" for part in parts).encode("ascii")).hexdigest()


BRANDS = range(2**61, 2**61 + 2**56)
"""Microseconds, some 73,000 years: a limit that nothing will ever reach (see runner.processes)."""


def session_brand(path: str) -> int:
    """Return the brand of the session whose folder has that path in the sandbox."""
    return BRANDS.start + int.from_bytes(hashlib.sha256(path.encode("utf-8", "surrogateescape")).digest()[:7], "big")


def request_digest(request: Request) -> str:
    """Return the sha256 (hex) of the request's canonical JSON: sorted keys, compact, ASCII."""
    canonical = json.dumps(asdict(request), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def prewarm_of(request: Request) -> Request:
    """Return what is known of a request before it is asked: all but the prompt and the input."""
    return replace(request, prompt="", input=[])


def request_from(raw: bytes) -> Request:
    """Read a request.json as the sandbox does.

    Raises:
        ValueError: it is not a request of this version (the message says where).
    """
    plain = json.loads(raw)
    if not isinstance(plain, dict) or plain.get("v") != VERSION:
        raise ValueError(
            f"request.json: found version {plain.get('v') if isinstance(plain, dict) else None!r}, needed {VERSION}"
        )
    try:
        model = plain.pop("model", None)
        accesses = [ToolAccess(**access) for access in plain.pop("tool_accesses", None) or []]
        return Request(**plain, model=None if model is None else Model(**model), tool_accesses=accesses)
    except TypeError as error:
        raise ValueError(f"request.json: {error}") from error


OUTCOME_EXIT = {outcome: status for status, outcome in enumerate(Outcome)}
"""What `run --wait` and the host's `boxstrap run` exit with, by outcome: 0 completed, 1 gave_up, … in table order."""


def outcome_of(receipt: Receipt) -> Outcome:
    """Judge how a session ended from its receipt. Infrastructure first: it may never look like the agent's doing."""
    if receipt.supervisor_lost:
        return Outcome.SANDBOX_LOST
    if receipt.stopped:
        return Outcome.CANCELLED
    said = Outcome(receipt.status) if receipt.status in set(Outcome) else None
    if receipt.timed_out and said is not Outcome.MODEL_FAILED:
        return Outcome.DEADLINE_EXCEEDED
    if said in {Outcome.COMPLETED, None}:
        return Outcome.COMPLETED if receipt.exit_code == 0 else Outcome.AGENT_FAILED
    return said
