# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A child that ignores TERM, leaves daemons in every way, says `ready`, and then does what argv[1] says."""

import os
import signal
import subprocess
import sys
import time


def daemon(*, scrub: bool) -> None:
    """Double-fork, leave the session, close every descriptor, optionally lose the environment, and sleep."""
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(0, 64)
    environment = {} if scrub else dict(os.environ)
    os.execve(sys.executable, [sys.executable, "-c", "import signal,time; signal.signal(15, 1); time.sleep(600)"], environment)


def main() -> None:
    """Act out one scenario."""
    scenario = sys.argv[1]
    if scenario == "daemons":
        for scrub in (False, True):
            daemon(scrub=scrub)
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    elif scenario in {"ignore-term", "spin"}:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    if scenario == "spin":
        while True:
            pass
    if scenario in {"ignore-term", "sleep"}:
        time.sleep(600)
    if scenario == "kill-supervisor":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)


main()
