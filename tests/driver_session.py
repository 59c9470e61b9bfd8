# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The supervisor's end of a driver, reduced to pipes: starts the real gateway and the real driver, and collects their events.

It refuses to supervise: no deadline, no reaping. That is what the supervisor's own tests are for.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from polling import eventually

from boxstrap.runner.agents import nooa
from boxstrap.runner.gateway_process import GatewayProcess
from boxstrap.runner.layout import RuntimePaths, SessionPaths
from boxstrap.runner.wire import Kind, Request, to_json

Event = dict[str, Any]


class DriverSession:
    """One driver process. `events` grows while it runs; `inode` is the event pipe's, for whoever looks for leaks."""

    def __init__(self, request: Request, runtime: RuntimePaths, folder: Path, env: Mapping[str, str] | None = None) -> None:
        paths = SessionPaths(str(folder / "session"))
        Path(paths.path).mkdir()
        Path(paths.request).write_text(to_json(request), encoding="ascii")
        self.home = folder / "home"
        self.home.mkdir()
        self.events: list[Event] = []
        assert request.model is not None
        self._gateway = GatewayProcess(request, request.model, paths, {"PATH": os.environ["PATH"]}, self._record)
        self._calls = threading.Thread(target=self._read_calls, daemon=True)
        self._calls.start()
        launch = nooa.launch(replace(request, model=self._gateway.model), paths, runtime)
        reader, writer = os.pipe()
        self.inode = os.fstat(writer).st_ino
        own = {"BOXSTRAP_EVENTS_FD": str(writer), "BOXSTRAP_SESSION_DIR": paths.path, "BOXSTRAP_SESSION": request.session_id}
        task = {"PATH": os.environ["PATH"], "HOME": str(self.home), "TMPDIR": str(self.home), "LC_ALL": "C.UTF-8"}
        self.max_rss_mib = 0.0
        self.output = folder / "agent.out"
        self.started_at = time.monotonic()
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                launch.argv,
                cwd=request.workdir,
                env={**task, **(env or {}), **own, **launch.env},
                pass_fds=(writer,),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        os.close(writer)
        self._pipe = os.fdopen(reader, "rb")
        self._listening = True
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait(self, within_s: float = 60.0) -> int:
        """Wait for its end and its last event; return its exit code (negative: a signal)."""

        def gone() -> bool:
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                self.process.returncode = os.waitstatus_to_exitcode(status)
                self.max_rss_mib = usage.ru_maxrss / 1024
            return bool(pid)

        if self.process.returncode is None:
            eventually(gone, within_s=within_s)
        self._thread.join(within_s)
        self._end_gateway()
        self.seconds = time.monotonic() - self.started_at
        return int(self.process.returncode)

    def kill(self) -> None:
        """End it and its group, however it stands."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, 9)
            self.wait()
        self._thread.join()
        self._end_gateway()

    def hang_up(self) -> None:
        """Stop listening at the next event, as a supervisor does that was killed."""
        self._listening = False

    def of(self, kind: str) -> list[Event]:
        """The data of every event of a kind."""
        return [event["data"] for event in self.events if event["kind"] == kind]

    @property
    def result(self) -> Event:
        """The data of the result line, which must be the last and the only one."""
        own = [event for event in self.events if event["kind"] != "model_call"]
        assert [event["kind"] for event in own].index("result") == len(own) - 1, own
        return own[-1]["data"]  # type: ignore[no-any-return]

    def _end_gateway(self) -> None:
        """Let it write what it has to say, once the driver is gone."""
        self._gateway.hang_up()
        self._calls.join()
        if self._gateway.pid:
            os.waitpid(self._gateway.pid, 0)
            self._gateway.pid = 0

    def _record(self, kind: Kind, data: Mapping[str, object]) -> None:
        self.events.append({"kind": kind.value, "data": dict(data)})

    def _read_calls(self) -> None:
        os.set_blocking(self._gateway.pump.fd, True)
        while self._gateway.pump.read():
            continue

    def _read(self) -> None:
        with self._pipe:
            while self._listening and (line := self._pipe.readline()):
                self.events.append(json.loads(line))
