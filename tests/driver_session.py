# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The supervisor's end of a driver, reduced to a pipe: starts the real driver on a request and collects its event lines.

It refuses to supervise: no deadline, no reaping. That is what the supervisor's own tests are for.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polling import eventually

from boxstrap.runner.agents import nooa
from boxstrap.runner.layout import RuntimePaths, SessionPaths
from boxstrap.runner.wire import Request, to_json

Event = dict[str, Any]


class DriverSession:
    """One driver process. `events` grows while it runs; `inode` is the event pipe's, for whoever looks for leaks."""

    def __init__(self, request: Request, runtime: RuntimePaths, folder: Path, env: Mapping[str, str] | None = None) -> None:
        paths = SessionPaths(str(folder / "session"))
        Path(paths.path).mkdir()
        Path(paths.request).write_text(to_json(request), encoding="ascii")
        self.home = folder / "home"
        self.home.mkdir()
        launch = nooa.launch(request, paths, runtime)
        reader, writer = os.pipe()
        self.inode = os.fstat(writer).st_ino
        own = {"BOXSTRAP_EVENTS_FD": str(writer), "BOXSTRAP_SESSION_DIR": paths.path, "BOXSTRAP_SESSION": request.session_id}
        task = {"PATH": os.environ["PATH"], "HOME": str(self.home), "TMPDIR": str(self.home), "LC_ALL": "C.UTF-8"}
        self.events: list[Event] = []
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
        self.seconds = time.monotonic() - self.started_at
        return int(self.process.returncode)

    def kill(self) -> None:
        """End it and its group, however it stands."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, 9)
            self.wait()
        self._thread.join()

    def hang_up(self) -> None:
        """Stop listening at the next event, as a supervisor does that was killed."""
        self._listening = False

    def of(self, kind: str) -> list[Event]:
        """The data of every event of a kind."""
        return [event["data"] for event in self.events if event["kind"] == kind]

    @property
    def result(self) -> Event:
        """The data of the result line, which must be the last and the only one."""
        assert [event["kind"] for event in self.events].index("result") == len(self.events) - 1, self.events
        return self.events[-1]["data"]  # type: ignore[no-any-return]

    def _read(self) -> None:
        with self._pipe:
            while self._listening and (line := self._pipe.readline()):
                self.events.append(json.loads(line))
