# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A scripted stand-in for a model: an HTTP server that answers from a script (model_scripts.py) instead of thinking.

It speaks POST …/v1/chat/completions, POST …/v1/responses (JSON, and SSE when asked to stream) and GET …/v1/models below
any path prefix, and it can fail in every way that a model server fails in (`Fault`). It refuses to keep a conversation: the
request says how often it has answered, so any number of sessions may talk to it at once.

    python tests/scripted_model.py --script fix-bug --fault 429:2     prints its URL as its first line
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from model_dialects import answer, events, strict_objection, turns_taken
from model_scripts import SCRIPTS, turns_of

HANG_MAX_S = 3600.0
_STATUS_WORDS = {400: "bad_request", 401: "invalid_api_key", 408: "timeout", 422: "unprocessable", 429: "rate_limit_exceeded"}


@dataclass
class Fault:
    """What goes wrong instead of an answer, for the next `times` calls (None: for ever).

    `kind` is an HTTP status ("500", "429"; `value` is then a Retry-After in seconds), "hang" (no answer), "break" (the
    connection ends in the middle of the body), "garbage" (200 with what is no JSON), "failed" (a Responses body that
    says so itself), "context" (400: the prompt is too long), or "slow" (the right answer after `value` seconds).
    """

    kind: str
    value: float | None = None
    times: int | None = None

    @classmethod
    def parse(cls, spec: str) -> Fault:
        """Read `KIND[=VALUE][:TIMES]`, for example `429=1:2` or `hang`.

        Raises:
            ValueError: there is no such fault.
        """
        rest, _, times = spec.partition(":")
        kind, _, value = rest.partition("=")
        if not kind.isdigit() and kind not in {"hang", "break", "garbage", "failed", "context", "slow"}:
            raise ValueError(f"there is no fault {kind!r}")
        return cls(kind, float(value) if value else None, int(times) if times else None)


@dataclass(frozen=True)
class Recorded:
    """One request as it came. Header names are lower case; `body` is None when it is no JSON."""

    method: str
    path: str
    headers: dict[str, str]
    body: object
    at: float


@dataclass
class ScriptedModel:
    """The server, started by `with` or `start()`. `url` is what an agent is given as its model's URL (it ends in /v1).

    `script` is `NAME` or `NAME:NUMBER`; a request whose model name is itself such a spec gets that script. With `strict`,
    bodies are refused (422) where NeMo Gym's request schemas would refuse them.
    """

    script: str = "fix-bug"
    faults: Sequence[Fault] = ()
    strict: bool = False
    bind: str = "127.0.0.1"
    port: int = 0
    requests: list[Recorded] = field(default_factory=list)

    def __post_init__(self) -> None:
        if turns_of(self.script) is None:
            raise ValueError(f"there is no script {self.script!r}: choose one of {', '.join(SCRIPTS)}")
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        """The model's URL, up to and including /v1."""
        if self._server is None:
            raise RuntimeError("the scripted model is not started")
        host, port = self._server.server_address[:2]
        return f"http://{host if isinstance(host, str) else host.decode()}:{port}/v1"

    @property
    def calls(self) -> list[Recorded]:
        """The requests that asked for an answer."""
        return [request for request in self.requests if request.method == "POST" and "/_" not in request.path]

    def start(self) -> ScriptedModel:
        """Bind and serve in the background."""
        model = self

        class Handler(_Handler):
            scripted = model

        self._server = _Server((self.bind, self.port), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def close(self) -> None:
        """Stop serving and let go of whoever hangs."""
        self._closing.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def __enter__(self) -> ScriptedModel:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def record(self, request: Recorded) -> None:
        """Keep a request."""
        with self._lock:
            self.requests.append(request)

    def next_fault(self) -> Fault | None:
        """Return what goes wrong with this call, and count it."""
        with self._lock:
            for fault in self.faults:
                if fault.times is None or fault.times > 0:
                    fault.times = fault.times and fault.times - 1
                    return fault
        return None

    def wait(self, seconds: float) -> None:
        """Wait, but not beyond the server's own end."""
        self._closing.wait(seconds)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 512

    def handle_error(self, request: object, client_address: object) -> None:
        """Stay silent: clients that leave early are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    scripted: ScriptedModel
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Serve the list of models and what was recorded."""
        if self.path == "/_requests":
            return self._send(200, [vars(request) for request in self.scripted.requests])
        self._record(None)
        if self.path.endswith("/v1/models"):
            models = [{"id": name, "object": "model", "created": 0, "owned_by": "scripted"} for name in SCRIPTS]
            return self._send(200, {"object": "list", "data": models})
        return self._refuse(404, f"nothing at {self.path}")

    def do_POST(self) -> None:
        """Answer as the script and the faults say."""
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        if self.path == "/_faults":
            self.scripted.faults = [Fault.parse(spec) for spec in body or []]
            return self._send(200, {"faults": len(self.scripted.faults)})
        self._record(body)
        dialect = next((name for name in ("chat/completions", "responses") if self.path.endswith(f"/v1/{name}")), None)
        if dialect is None:
            return self._refuse(404, f"nothing at {self.path}")
        fault = self.scripted.next_fault()
        if fault is not None and fault.kind != "slow":
            return self._fail(fault)
        if fault is not None:
            self.scripted.wait(fault.value or 0.0)
        if not isinstance(body, dict):
            return self._refuse(400, "the body is no JSON object")
        objection = strict_objection(dialect, body) if self.scripted.strict else ""
        if objection:
            return self._refuse(422, objection)
        turns = turns_of(str(body.get("model"))) or turns_of(self.scripted.script) or []
        reply = answer(dialect, body, turns[min(turns_taken(dialect, body), len(turns) - 1)])
        if body.get("stream"):
            return self._stream(events(dialect, body, reply))
        return self._send(200, reply)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class names it)
        """Say nothing: what was asked is in `requests`."""

    def _record(self, body: object) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.scripted.record(Recorded(self.command, self.path, headers, body, time.time()))

    def _fail(self, fault: Fault) -> None:
        if fault.kind == "hang":
            self.close_connection = True
            return self.scripted.wait(HANG_MAX_S)
        if fault.kind == "garbage":
            return self._send_bytes(200, b"<html>\x00 upstream \xff said this</html>", "application/json")
        if fault.kind == "break":
            self._head(200, "application/json", 4096)
            self.wfile.write(b'{"id": "half of an ans')
            self.close_connection = True
            return None
        if fault.kind == "failed":
            error = {"code": "server_error", "message": "scripted: the model failed"}
            return self._send(
                200, {"id": "resp_failed", "object": "response", "status": "failed", "error": error, "output": []}
            )
        if fault.kind == "context":
            message = "This model's maximum context length is 8192 tokens; the prompt contains 9000 tokens"
            return self._refuse(400, message, "context_length_exceeded")
        headers = {} if fault.value is None else {"Retry-After": f"{fault.value:g}"}
        return self._refuse(int(fault.kind), f"scripted: {fault.kind}", headers=headers)

    def _refuse(self, status: int, message: str, code: str = "", headers: dict[str, str] | None = None) -> None:
        error = {"message": message, "type": "scripted_error", "code": code or _STATUS_WORDS.get(status, "server_error")}
        self._send(status, {"error": error}, headers)

    def _send(self, status: int, value: object, headers: dict[str, str] | None = None) -> None:
        self._send_bytes(status, json.dumps(value).encode(), "application/json", headers)

    def _send_bytes(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self._head(status, kind, len(body), headers)
        self.wfile.write(body)

    def _head(self, status: int, kind: str, length: int | None, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Set-Cookie", f"policy={len(self.scripted.requests)}; Path=/")
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()

    def _stream(self, parts: Iterator[str]) -> None:
        self.close_connection = True
        self._head(200, "text/event-stream", None, {"Connection": "close"})
        for part in parts:
            self.wfile.write(part.encode())


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description="A scripted stand-in for a model.")
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--script", default="fix-bug", help=f"NAME or NAME:NUMBER; one of {', '.join(SCRIPTS)}")
    parser.add_argument("--fault", action="append", default=[], type=Fault.parse, help="KIND[=VALUE][:TIMES]")
    parser.add_argument("--strict", action="store_true", help="refuse what NeMo Gym's request schemas refuse")
    args = parser.parse_args()
    with ScriptedModel(args.script, args.fault, args.strict, args.bind, args.port) as model:
        print(model.url, flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
