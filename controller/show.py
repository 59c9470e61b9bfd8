# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What a person sees while a session runs: phases with seconds, model and tool calls, the receipt.

Everything that came out of a sandbox is stripped of control characters first, so that no escape reaches the screen.
"""

from __future__ import annotations

import time
import unicodedata

from rich.console import Console
from rich.text import Text

from boxstrap.controller.session import Result
from boxstrap.runner.wire import Event, Kind, Receipt

_WIDTH = 100


def printable(value: object, width: int = _WIDTH) -> str:
    """Return one line of at most `width` characters without control, format or private characters."""
    text = " ".join(str(value)[: width * 8].split())
    clean = "".join(
        character if unicodedata.category(character)[0] != "C" else "\N{REPLACEMENT CHARACTER}" for character in text
    )
    return clean if len(clean) <= width else clean[: width - 1] + "…"


class Progress:
    """Prints one line a phase or event, with seconds since the start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = time.monotonic()

    def line(self, what: str, text: str = "", *, style: str = "") -> None:
        """Print one line."""
        stamp = f"{time.monotonic() - self._begun:8.2f} s  "
        self._console.print(Text.assemble((stamp, "dim"), (f"{what:<14} ", style), (text, "")), soft_wrap=True)

    def phase(self, name: str, seconds: float) -> None:
        """Tell of a phase that ended."""
        self.line("phase", f"{printable(name, 40):<20} {seconds:7.2f} s", style="cyan")

    def note(self, text: str) -> None:
        """Tell of work that takes long."""
        self.line("note", printable(text, 200), style="dim")

    def event(self, event: Event) -> None:
        """Tell of what an agent did; heartbeats and phases have their own place."""
        told = _told(event)
        if told is not None:
            self.line(event.kind, told, style=_STYLES.get(event.kind, ""))


_STYLES: dict[str, str] = {Kind.MODEL_CALL: "magenta", Kind.GAP: "yellow", Kind.AGENT_EXITED: "bold", Kind.MESSAGE: "green"}


def _told(event: Event) -> str | None:
    data = event.data
    match event.kind:
        case Kind.MODEL_CALL:
            tokens = data.get("usage")
            return printable(f"{data.get('status')} in {data.get('seconds')} s, {data.get('dialect', '')} {tokens or ''}")
        case Kind.PYTHON_EXECUTION:
            return printable(data.get("code", ""))
        case Kind.TOOL_CALL | Kind.RESOURCE_CALL:
            return printable(f"{data.get('tool_name', data.get('name'))} {data.get('arguments', '')} {data.get('status', '')}")
        case Kind.TOOL_RESULT:
            return printable(data.get("output", data.get("result", "")))
        case Kind.MESSAGE | Kind.REASONING | Kind.LOG:
            return printable(data.get("text", data.get("content", data.get("name", ""))))
        case Kind.AGENT_EXITED:
            return printable(
                f"exit code {data.get('exit_code')}, signal {data.get('signal')}, says {data.get('status') or 'nothing'}"
            )
        case Kind.HEARTBEAT | Kind.PHASE | Kind.ENDED:
            return None
        case _:
            return printable(data)


def show_result(console: Console, result: Result) -> None:
    """Print the outcome, the receipt and where the evidence lies."""
    grade = "gradable" if result.gradable else "not gradable" + (", retryable" if result.outcome.retryable else "")
    console.print(Text.assemble("\noutcome    ", (result.outcome.value, "bold"), f" ({grade}) {printable(result.detail, 300)}"))
    if result.receipt is not None:
        _show_receipt(console, result.receipt)
    for gap in result.gaps[:10]:
        console.print(Text(f"gap        {gap.code} at byte {gap.offset}: {printable(gap.detail)}", "yellow"))
    console.print(Text(f"evidence   {result.events} events in {result.evidence}"), soft_wrap=True)


def _show_receipt(console: Console, receipt: Receipt) -> None:
    console.print(
        Text(
            f"receipt    exit code {receipt.exit_code}, signal {receipt.signal}, "
            f"cleanup_confirmed {receipt.cleanup_confirmed}, {len(receipt.survivors)} survivors, {receipt.reaped} reaped, "
            f"peak {receipt.peak_rss_bytes / 2**20:.0f} MiB, {receipt.cpu_seconds:.2f} CPU seconds, "
            f"oom_killed {receipt.oom_killed}, supervisor_lost {receipt.supervisor_lost}"
        ),
        soft_wrap=True,
    )
