# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Which processes belong to a session, read from /proc alone, and how they are signalled.

Three signs tell: parentage, the brand, and the marker in the environment. The brand is a resource limit that nothing
obeys: fork, exec, setsid, an emptied environment and another user all keep it, and /proc/<pid>/limits shows it to
everyone. A process is identified by (pid, start time), so that a reused pid is never hit. It refuses to match by name.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from boxstrap.runner.wire import BRANDS, session_brand

_PR_SET_CHILD_SUBREAPER = 36
_BRAND_LINE = b"Max realtime timeout"
_FREEZE_PASSES = 20


@dataclass(frozen=True)
class Process:
    """One entry of /proc. `start` is in clock ticks since boot."""

    pid: int
    parent: int
    start: int
    state: str
    name: str
    threads: int = 1

    @property
    def dead(self) -> bool:
        """Whether only its entry is left. One whose first thread has ended looks like a zombie, and its others run on."""
        return self.state in "ZX" and self.threads <= 1

    @property
    def key(self) -> tuple[int, int]:
        """What identifies it."""
        return self.pid, self.start


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
    return Process(pid, int(fields[1]), int(fields[19]), fields[0].decode(), name.decode(errors="replace"), int(fields[17]))


def every() -> list[Process]:
    """List all processes of this pid namespace."""
    found = (read(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
    return [process for process in found if process is not None]


def alive(pid: int, start: int) -> bool:
    """Whether that very process still runs (a zombie does not)."""
    process = read(pid)
    return process is not None and process.start == start and not process.dead


def descendants(roots: Iterable[int], processes: Iterable[Process]) -> list[Process]:
    """List what stems from `roots` by parentage, each once; a root only if it is below another."""
    children: dict[int, list[Process]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    queue = list(roots)
    while queue:
        below = children.pop(queue.pop(), [])
        found += below
        queue += [process.pid for process in below]
    return found


def take_brand(number: int) -> bool:
    """Brand this process and all that it will start; False where the kernel does not keep or show such a limit."""
    try:
        hard = resource.getrlimit(resource.RLIMIT_RTTIME)[1]
        resource.setrlimit(resource.RLIMIT_RTTIME, (number, hard))
    except (OSError, ValueError):
        return False
    return brand_on(os.getpid()) == number


def brand_on(pid: int) -> int | None:
    """Return the brand that a process bears, or None."""
    try:
        with open(f"/proc/{pid}/limits", "rb") as file:
            line = next((line for line in file if line.startswith(_BRAND_LINE)), b"")
    except OSError:
        return None
    soft = line[len(_BRAND_LINE) :].split()[:1]
    number = int(soft[0]) if soft and soft[0].isdigit() else 0
    return number if number in BRANDS else None


def bears_marker(pid: int, marker: bytes) -> bool:
    """Whether a process was started with `marker` (b"NAME=value") in its environment, as far as we may read that."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return marker in file.read().split(b"\0")
    except OSError:
        return False


def belonging(session: str, marker: bytes, everyone: Collection[Process], *, below: Iterable[int] = ()) -> list[Process]:
    """List what belongs to a session by any sign, this process left out.

    Args:
        session: the path of its folder, of which the brand is made.
        marker: its marker. Another session may have the same id in another folder; its brand tells the two apart.
        everyone: all processes.
        below: processes that everything below them is known to belong by.
    """
    ours = session_brand(session)
    found = set(descendants(below, everyone))
    signed = []
    for process in everyone:
        if process not in found:
            seen = brand_on(process.pid)
            if seen == ours or (seen is None and bears_marker(process.pid, marker)):
                signed.append(process)
    found.update(signed, descendants((process.pid for process in signed), everyone))
    return [process for process in found if process.pid != os.getpid()]


def unaccounted(before: Collection[tuple[int, int]], everyone: Collection[Process]) -> list[Process]:
    """List what has started since `before` was taken, bears no sign, and hangs from a process that ran then.

    Such a process may be the session's (a daemon that shed every sign after the supervisor was killed) or the box's own,
    and nobody can tell: it is reported and not killed. What an exec started from outside hangs from a new root.
    """
    by_pid = {process.pid: process for process in everyone}
    first = by_pid.get(1)
    if first is not None and first.key not in before:
        return []  # the box was restarted: the kernel let nothing of then live on
    found = []
    for process in everyone:
        top = process
        while top.key not in before and top.parent in by_pid:
            top = by_pid[top.parent]
        if process.key in before or top.key not in before or process.dead:
            continue
        if process.pid != os.getpid() and brand_on(process.pid) is None:
            found.append(process)
    return found


def kill(find: Callable[[], list[Process]]) -> None:
    """Freeze what `find` finds until it finds no more that runs, then KILL it all.

    What is stopped cannot fork, and a slot that a dead one leaves is not taken at once: killing one by one loses
    against something that forks as fast as it is killed.
    """
    frozen: set[tuple[int, int]] = set()
    found: list[Process] = []
    for _ in range(_FREEZE_PASSES):
        found = find()
        fresh = [process for process in found if process.key not in frozen]
        if not fresh:
            break
        for process in fresh:
            frozen.add(process.key)
            send(process, signal.SIGSTOP)
    for process in found:
        send(process, signal.SIGKILL)


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
