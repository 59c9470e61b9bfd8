# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What the verbs of a session answer, as lines for people. It refuses to let an escape of the agent's reach a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

_FLAGS = ("timed_out", "stopped", "oom_killed", "supervisor_lost", "output_truncated")


def told(answer: Mapping[str, object]) -> Iterator[str]:
    """Yield one line a fact; a receipt is told as what ended the agent, what was left, and what it cost."""
    for key, value in answer.items():
        if key == "receipt":
            if isinstance(value, Mapping):
                yield from _receipt(value)
        elif isinstance(value, list):
            yield _line(key, ", ".join(_process(one) for one in value) or "none")
        else:
            yield _line(key, "none" if value is None else value)


def _receipt(receipt: Mapping[str, object]) -> Iterator[str]:
    ended = f"exit code {receipt['exit_code']}" if receipt["signal"] is None else f"signal {receipt['signal']}"
    if receipt["exit_code"] is None and receipt["signal"] is None:
        ended = "never started, or nobody saw how"
    yield _line("agent", f"{receipt['agent']}: {ended}")
    if receipt["status"] or receipt["detail"]:
        yield _line("it said", ": ".join(str(receipt[name]) for name in ("status", "detail") if receipt[name]))
    yield _line("flags", ", ".join(name for name in _FLAGS if receipt[name]) or "none")
    left = [*_list(receipt["survivors"]), *_list(receipt["unaccounted"])]
    confirmed = "confirmed" if receipt["cleanup_confirmed"] else "NOT confirmed"
    yield _line("cleanup", f"{confirmed}, {receipt['reaped']} reaped, left: {', '.join(map(_process, left)) or 'none'}")
    if isinstance(receipt["started_at"], float) and isinstance(receipt["ended_at"], float):
        began = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(receipt["started_at"]))
        yield _line("ran", f"{receipt['ended_at'] - receipt['started_at']:.1f} s from {began}")
    peak = receipt["peak_rss_bytes"]
    yield _line("cost", f"{receipt['cpu_seconds']} CPU seconds, peak {peak / 2**20 if isinstance(peak, int) else 0:.0f} MiB")
    sizes = (f"{name} {receipt[f'{name}_bytes']} bytes" for name in ("evidence", "stdout", "stderr"))
    yield _line("wrote", ", ".join(sizes))


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _process(one: object) -> str:
    return f"{one['pid']} ({one['name']})" if isinstance(one, Mapping) else str(one)


def _line(key: str, value: object) -> str:
    clean = "".join(letter if letter.isprintable() else " " for letter in f"{value}")
    return f"{key.replace('_', ' '):16} {clean}"
