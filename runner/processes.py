# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Which processes belong to a session, read from /proc alone, and how they are signalled.

A process is identified by (pid, start time), so that a reused pid is never hit. It refuses to match by name.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Process:
    """One entry of /proc. `start` is in clock ticks since boot."""

    pid: int
    parent: int
    start: int
    state: str
    name: str


def become_subreaper() -> bool:
    """Adopt every orphan below us from now on; False where the kernel will not."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def read(pid: int) -> Process | None:
    """Read /proc/<pid>/stat, or None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            raw = file.read(4096)
    except OSError:
        return None
    name, _, rest = raw.partition(b"(")[2].rpartition(b")")
    fields = rest.split()
    if len(fields) < 20:
        return None
    return Process(pid, int(fields[1]), int(fields[19]), fields[0].decode(), name.decode(errors="replace"))


def every() -> list[Process]:
    """List all processes of this pid namespace."""
    found = (read(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
    return [process for process in found if process is not None]


def alive(pid: int, start: int) -> bool:
    """Whether that very process still runs (a zombie does not)."""
    process = read(pid)
    return process is not None and process.start == start and process.state not in "ZX"


def descendants(root: int, processes: Iterable[Process]) -> list[Process]:
    """List what stems from `root` by parentage, `root` itself left out."""
    children: dict[int, list[Process]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += [process.pid for process in below]
    return found


def marked(marker: bytes, processes: Iterable[Process]) -> list[Process]:
    """List the processes whose initial environment holds `marker` (b"NAME=value")."""
    found = []
    for process in processes:
        try:
            with open(f"/proc/{process.pid}/environ", "rb") as file:
                environ = file.read()
        except OSError:
            continue
        if marker in environ.split(b"\0"):
            found.append(process)
    return found


def send(process: Process, number: signal.Signals) -> None:
    """Signal that very process; nothing happens when it is gone or its pid was reused."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        if alive(process.pid, process.start):
            _kill(process.pid, number)
        return
    try:
        if alive(process.pid, process.start):
            signal.pidfd_send_signal(handle, number)
    except OSError:
        return
    finally:
        os.close(handle)


def _kill(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        return
