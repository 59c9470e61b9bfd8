# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""How a driver starts: a module of ours that runs an agent's Python packages, in the published interpreter.

`start` is the supervisor's end; the driver's main() calls `run`, or `begin` and does the rest itself. It refuses to let the
workdir, the task's PYTHON* variables or anything but the payload decide what is imported.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from boxstrap.runner.agents import Launch
from boxstrap.runner.agents.event_writer import EventWriter
from boxstrap.runner.environment import GO, MODEL_URL, SESSION_DIR, WAITS, restore_task_variables
from boxstrap.runner.layout import RuntimePaths, SessionPaths
from boxstrap.runner.wire import REQUEST_MAX, ExitStatus, Outcome, Request, prewarm_of, request_from


def start(request: Request, runtime: RuntimePaths, module: str) -> Launch:
    """Start `main()` of a module: -I keeps PYTHON* and the workdir out of it, -B keeps it from writing into the runtime.

    It reports through the event pipe; its stdout is chatter of libraries, kept in agent.out.
    """
    code = f"import sys; sys.path += sys.argv[1:]; del sys.argv[1:]; from {module} import main; main()"
    argv = [runtime.python, "-I", "-B", "-c", code, runtime.site, runtime.app]
    return Launch(argv=argv, env={MODEL_URL: request.model.url} if request.model else {}, interpreter=True)


def begin() -> tuple[Request, EventWriter, Callable[[], Request]]:
    """Return the request, the event pipe, and what to call for the request before anything is done with its prompt.

    A driver that was started early gets a request without one, and that call returns when there is one. The environment is
    the task's from here on. A driver that cannot begin ends here, and says why.
    """
    restore_task_variables(os.environ)
    try:
        events = EventWriter.from_environment(os.environ)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"boxstrap driver: {error}\n")
        sys.exit(ExitStatus.USAGE)
    session, url = SessionPaths(os.environ.pop(SESSION_DIR, "")), os.environ.pop(MODEL_URL, "")

    def take(path: str) -> Request:
        try:
            with open(path, "rb") as file:
                request = request_from(file.read(REQUEST_MAX))
            os.chdir(request.workdir)
        except (ValueError, OSError) as error:
            events.result(Outcome.SETUP_FAILED, f"the request cannot be run: {type(error).__name__}: {error}", None)
            sys.exit(1)
        if request.model is not None and url:  # headers are the gateway's to add
            request = replace(request, model=replace(request.model, url=url, headers={}))
        return request

    if not os.environ.pop(WAITS, ""):
        request = take(session.request)
        return request, events, lambda: request
    prewarmed = take(session.prewarm)

    def wait() -> Request:
        if os.read(0, len(GO)) != GO:
            os._exit(ExitStatus.OK)  # nobody asks any more
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        request = take(session.request)
        if prewarm_of(request) != prewarmed:
            events.result(Outcome.SETUP_FAILED, "the agent was started early for another request", None)
            sys.exit(1)
        return request

    return prewarmed, events, wait


def run(solve: Callable[[Request, EventWriter], tuple[Outcome, str]]) -> NoReturn:
    """Be a driver's main(): begin, solve, report how it ended, and leave at once: agent code's threads have no say.

    What `solve` raises is the agent's failure; where the model is to blame, the gateway knows, and the supervisor asks it.
    """
    _, events, wait = begin()
    request = wait()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to stop by SIGTERM"))
    try:
        outcome, detail = solve(request, events)
    except BaseException as error:  # noqa: BLE001
        # Broad on purpose: a session without a result line explains nothing.
        outcome, detail = Outcome.AGENT_FAILED, f"{type(error).__name__}: {error}"
    events.result(outcome.value, detail, None)
    os._exit(0 if outcome is Outcome.COMPLETED else 1)
