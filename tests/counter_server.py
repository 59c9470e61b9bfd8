# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A small resources server with state: a counter for each session, which is known by its cookie.

It refuses to be forgiving: a call without the cookie that it gave is another session, and two calls at once are an error.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from boxstrap.runner.wire import ToolAccess

BY = {"type": "integer", "minimum": 1, "default": 1}
TOOLS: list[dict[str, object]] = [
    {
        "type": "function",
        "name": "increment",
        "description": "Add to this session's counter.",
        "parameters": {
            "type": "object",
            "properties": {"by": BY, "note": {"type": "string"}},
            "additionalProperties": False,
        },
    },
    {"type": "function", "name": "read", "description": "Read this session's counter.", "parameters": {"type": "object"}},
    {"type": "function", "name": "broken", "description": "Answer with an error.", "parameters": None},
]


@dataclass
class CounterServer:
    """The server, started by `with`; a call takes `takes_s` seconds.

    `counters` is what each cookie's session has; `calls` what came, in order.
    """

    bind: str = "127.0.0.1"
    takes_s: float = 0.02
    counters: dict[str, int] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    overlaps: int = 0

    def access(self, **more: Any) -> ToolAccess:
        """Return the grant of this server, as an environment server would seed it."""
        given: dict[str, Any] = {"name": "counter.direct_http", "base_url": self.url, "tools": TOOLS}
        return ToolAccess(**{**given, "headers": {"x-grant": "g"}, "cookies": {"session": "seeded"}, **more})

    @property
    def url(self) -> str:
        """Its base URL, with a path of its own."""
        host, port = self._server.server_address[:2]
        return f"http://{host if isinstance(host, str) else host.decode()}:{port}/counter"

    def __enter__(self) -> CounterServer:
        counter = self

        class Handler(_Handler):
            served = counter

        self._server = ThreadingHTTPServer((self.bind, 0), Handler)
        self._server.daemon_threads = True
        self._at_once = threading.Semaphore()
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving: the next call is refused."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    served: CounterServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        """Serve one function."""
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        jar = {key: morsel.value for key, morsel in SimpleCookie(self.headers.get("Cookie", "")).items()}
        name = self.path.removeprefix("/counter/")
        self.served.calls.append({"name": name, "arguments": json.loads(raw), "cookies": jar, "grant": self.headers["x-grant"]})
        if not self.served._at_once.acquire(blocking=False):
            self.served.overlaps += 1
            return self._answer(409, {"error": "two calls at once"})
        try:
            time.sleep(self.served.takes_s)  # long enough for a second call to come, were it sent
            return self._serve(name, json.loads(raw), jar)
        finally:
            self.served._at_once.release()

    def _serve(self, name: str, arguments: dict[str, Any], jar: dict[str, str]) -> None:
        session = jar.get("session", "nobody")
        count = self.served.counters.get(session, 0) + (arguments["by"] if name == "increment" else 0)
        if name == "broken":
            return self._answer(500, "out of order")
        self.served.counters[session] = count
        return self._answer(200, {"count": count}, cookies={"session": session, "seen": str(len(self.served.calls))})

    def _answer(self, status: int, value: object, cookies: dict[str, str] | None = None) -> None:
        body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        for key, text in (cookies or {}).items():
            self.send_header("Set-Cookie", f"{key}={text}; Path=/; HttpOnly")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class names it)
        """Say nothing."""
