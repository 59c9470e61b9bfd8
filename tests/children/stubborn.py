# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A child that ignores TERM, leaves daemons in every way, says `ready`, and then does what argv[1] says."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def daemon(*, scrub: bool) -> None:
    """Double-fork, leave the session, close every descriptor, optionally lose the environment, and sleep."""
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(0, 64)
    environment = {} if scrub else dict(os.environ)
    code = "import signal,time; signal.signal(15, 1); time.sleep(600)"
    os.execve(sys.executable, [sys.executable, "-c", code, *sys.argv[2:]], environment)


def shed_everything() -> None:
    """Lose the one sign that a scrubbed daemon keeps by accident: only who knows of it can."""
    hard = resource.getrlimit(resource.RLIMIT_RTTIME)[1]
    resource.setrlimit(resource.RLIMIT_RTTIME, (hard, hard))


def headless() -> None:
    """End the first thread and run on in another: /proc calls that a zombie."""
    if os.fork() == 0:
        threading.Thread(target=time.sleep, args=(600,)).start()
        ctypes.CDLL(None).pthread_exit(None)


def traced() -> None:
    """Have a child that is stopped by the child that traces it."""
    seize, interrupt = 0x4206, 0x4207
    victim = subprocess.Popen(["sleep", "600"], start_new_session=True)
    if os.fork() == 0:
        ptrace = ctypes.CDLL(None).ptrace
        ptrace.argtypes = [ctypes.c_long] * 4
        done = ptrace(seize, victim.pid, 0, 0), ptrace(interrupt, victim.pid, 0, 0)
        os.write(1, b"traced=%d%d\n" % done)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)


def kill_above(*, number: int) -> None:
    """Signal the watchdog and the supervisor."""
    supervisor = os.getppid()
    watchdog = int(Path(f"/proc/{supervisor}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(watchdog, number)
    os.kill(supervisor, number)


def leave_daemons() -> None:
    """Leave one of each kind."""
    for scrub in (False, True):
        daemon(scrub=scrub)
    subprocess.Popen(["sleep", "600"], start_new_session=True)


def shed_then_daemon() -> None:
    """Leave one that bears no sign at all."""
    shed_everything()
    daemon(scrub=True)


def stopped() -> None:
    """Have a child that is stopped."""
    os.kill(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, signal.SIGSTOP)


def ignore_term() -> None:
    """Be deaf to TERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


BEFORE = {
    "daemons": leave_daemons,
    "daemons-then-kill-above": leave_daemons,
    "shed-then-kill-above": shed_then_daemon,
    "headless": headless,
    "traced": traced,
    "stopped": stopped,
    "ignore-term": ignore_term,
    "spin": ignore_term,
}


def main() -> None:
    """Act out one scenario."""
    scenario = sys.argv[1]
    BEFORE.get(scenario, int)()
    print("ready", flush=True)
    if scenario == "kill-supervisor":
        os.kill(os.getppid(), signal.SIGKILL)
    if scenario.endswith("-then-kill-above"):
        kill_above(number=signal.SIGKILL)
    if scenario == "stop-above":
        kill_above(number=signal.SIGSTOP)
    while scenario == "spin":
        pass
    if not scenario.startswith(("daemons", "shed-")):
        time.sleep(600)


main()
