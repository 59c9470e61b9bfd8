# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The gateway as its supervisor sees it: a child with a listening socket, an event pipe, and a lifeline.

The socket listens before the agent starts, so that no agent has to wait for the gateway's imports. The gateway ends when its
lifeline does: it cannot outlive the supervisor. It refuses to put a header into argv or the environment: they may be secret.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from urllib.parse import urlsplit

from boxstrap.runner import environment
from boxstrap.runner.layout import SessionPaths
from boxstrap.runner.wire import Model, Request, to_json

LOOPBACK = "127.0.0.1"
BACKLOG = 512
_START = "import sys; sys.path.append(sys.argv.pop(1)); from boxstrap.runner.gateway import main; main()"


class GatewayProcess:
    """A started gateway. `model` is what the agent is given: the loopback URL with the path of the real one, no headers."""

    def __init__(self, request: Request, model: Model, session: SessionPaths, environ: Mapping[str, str]) -> None:
        """Start it.

        Raises:
            OSError: no socket, or no process.
        """
        with socket.create_server((LOOPBACK, 0), backlog=BACKLOG) as listener:
            self.model = replace(
                model, url=f"http://{LOOPBACK}:{listener.getsockname()[1]}{urlsplit(model.url).path.rstrip('/')}", headers={}
            )
            self.events, events = os.pipe()
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
                os.close(self.events)
                os.close(self._lifeline)
                raise
            finally:
                os.close(lifeline)
                os.close(events)
        self.pid = child.pid
        child.returncode = 0  # the supervisor's loop reaps it; Popen must not try
        os.write(self._lifeline, to_json(config).encode("ascii") + b"\n")

    def end(self) -> None:
        """Ask it to break off, to write its last events, and to go."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def _app() -> str:
    """Name the folder that the boxstrap package lies in: the runtime's app/."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
