# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What the memory controller says of this process's group, in both versions of cgroups. It refuses to change a group."""

from __future__ import annotations

from collections.abc import Iterator

ROOT = "/sys/fs/cgroup"


def oom_kills(*, root: str = ROOT, own: str = "/proc/self/cgroup") -> int:
    """Count the group's out-of-memory kills since it was made; 0 where neither version's file can be read.

    Args:
        root: where the cgroup file systems are mounted. In most containers the group itself is mounted there.
        own: the file that names this process's groups, for where it is not.
    """
    for path in _candidates(root, own):
        try:
            with open(path, encoding="ascii") as file:
                # v2, memory.events: `oom_kill 3`. v1, memory.oom_control: the same line since Linux 4.13.
                found = [int(line.split()[1]) for line in file if line.startswith("oom_kill ")]
        except (OSError, ValueError, IndexError):
            continue
        if found:
            return found[0]
    return 0


def _candidates(root: str, own: str) -> Iterator[str]:
    try:
        with open(own, encoding="utf-8", errors="replace") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        lines = []
    for fields in lines:
        if len(fields) == 3 and fields[1] == "":
            yield f"{root}{fields[2].rstrip('/')}/memory.events"
            yield f"{root}/unified{fields[2].rstrip('/')}/memory.events"
        elif len(fields) == 3 and "memory" in fields[1].split(","):
            yield f"{root}/memory{fields[2].rstrip('/')}/memory.oom_control"
    yield f"{root}/memory.events"
    yield f"{root}/memory/memory.oom_control"
