# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The gateway as its supervisor sees it: a child with a listening socket, an event pipe, and a lifeline.

The socket listens before the agent starts, so that no agent has to wait for the gateway's imports. The gateway ends when its
lifeline does: it cannot outlive the supervisor. It refuses to put a header into argv or the environment: they may be secret.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from urllib.parse import urlsplit

from boxstrap.runner import environment
from boxstrap.runner.evidence import plain
from boxstrap.runner.layout import SessionPaths
from boxstrap.runner.model_state import ModelState
from boxstrap.runner.pump import Pump
from boxstrap.runner.wire import Kind, Model, Request, to_json

LOOPBACK = "127.0.0.1"
BACKLOG = 512
FINISH_BOUND_S = 5.0
"""From the end of the lifeline to SIGKILL."""
_START = "import sys; sys.path.append(sys.argv.pop(1)); from boxstrap.runner.gateway import main; main()"


class GatewayProcess:
    """A started gateway. `model` is what the agent is given: the loopback URL with the path of the real one, no headers.

    `pump` is its event pipe, for the supervisor's loop; `state` is what the calls say so far; `pid` is 0 once it was reaped.
    """

    def __init__(
        self,
        request: Request,
        model: Model,
        session: SessionPaths,
        environ: Mapping[str, str],
        record: Callable[[Kind, Mapping[str, object]], None],
    ) -> None:
        """Start it.

        Raises:
            OSError: no socket, or no process.
        """
        self.state = ModelState()
        self.exhausted_at = 0.0
        self.on_begin: Callable[[], None] = lambda: None
        """Called when a call begins: what the agent said before it is in its pipes by now, and comes first."""
        self._record = record
        with socket.create_server((LOOPBACK, 0), backlog=BACKLOG) as listener:
            self.model = replace(
                model, url=f"http://{LOOPBACK}:{listener.getsockname()[1]}{urlsplit(model.url).path.rstrip('/')}", headers={}
            )
            reader, events = os.pipe()
            lifeline, self._lifeline = os.pipe()
            config = {
                "listener": listener.fileno(),
                "events": events,
                "model": asdict(model),
                "max_policy_calls": request.max_policy_calls,
                "session": session.path,
            }
            env = {**environ, environment.MARKER: request.session_id}
            environment.hide_loader_variables(env)
            try:
                child = subprocess.Popen(
                    [sys.executable, "-I", "-B", "-c", _START, _app()],
                    env=env,
                    cwd="/",
                    stdin=lifeline,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(listener.fileno(), events),
                    start_new_session=True,
                )
            except OSError:
                os.close(reader)
                os.close(self._lifeline)
                raise
            finally:
                os.close(lifeline)
                os.close(events)
        self.pid = child.pid
        child.returncode = 0  # the supervisor's loop reaps it; Popen must not try
        os.write(self._lifeline, to_json(config).encode("ascii") + b"\n")
        self.pump = Pump(reader, path=None, on_line=self._on_line)

    def reaped(self, peak_bytes: int, cpu_s: float) -> None:
        """Note that the supervisor's loop reaped it; before its time, the agent is left without a model."""
        self.pid = 0
        cost = {"peak_rss_bytes": peak_bytes, "cpu_seconds": round(cpu_s, 3)}
        self._record(Kind.LOG, {"stream": "boxstrap", "text": f"the model gateway served {self.state.sent} requests", **cost})
        if self._lifeline >= 0:
            self.state.lost()
            self._record(Kind.GAP, {"code": "gateway_lost"})

    def hang_up(self) -> None:
        """Have it break off, write its last events, and go."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def finish(self) -> None:
        """Hang up, take its last events, and see that it goes."""
        self.hang_up()
        bound = time.monotonic() + FINISH_BOUND_S
        while self.pump.open and (left := bound - time.monotonic()) > 0:
            if select.select([self.pump.fd], [], [], left)[0]:
                self.pump.read()
        if self.pump.open and self.pid:
            os.kill(self.pid, signal.SIGKILL)  # a child of ours that was not reaped: the number is still its own
        self.pump.close()

    def _on_line(self, line: bytes) -> None:
        try:
            said = json.loads(line)
            kind, data = str(said["kind"]), {str(plain(key)): plain(value) for key, value in said["data"].items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self._record(Kind.GAP, {"code": "unknown_event", "bytes": len(line)})
            return
        if kind == "begin":
            self.on_begin()
        elif kind == "budget":
            self.state.exhausted = True
            self.exhausted_at = self.exhausted_at or time.monotonic()
        elif kind == Kind.MODEL_CALL:
            self.state.take(data)
            self._record(Kind.MODEL_CALL, data)
        else:
            self._record(Kind.LOG, data)


def _app() -> str:
    """Name the folder that the boxstrap package lies in: the runtime's app/."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
