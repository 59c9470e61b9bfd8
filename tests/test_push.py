# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Evidence that the box pushes, beside the pull: whatever breaks, each event is delivered once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_lifecycle import remains
from test_session import Counting, spec

from boxstrap.controller.collect import read_events
from boxstrap.controller.listening import listening
from boxstrap.controller.sandbox import Sandbox
from boxstrap.controller.sandboxes.local import LocalSandbox
from boxstrap.controller.session import Result, SessionSpec, open_session
from boxstrap.controller.sink import Sink
from boxstrap.runner.wire import Event, Outcome

HERE = "http://127.0.0.1:0"


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A box for all of these: the runtime is installed once."""
    return tmp_path_factory.mktemp("box")


class Conversations(Counting):
    """A local sandbox that counts its conversations as well."""

    def converse(self, command: str, **how: Any) -> Any:
        """Count and pass on."""
        self.commands.append(command)
        return self.inner.converse(command, **how)

    @property
    def tails(self) -> list[str]:
        """The commands that asked for evidence."""
        return [command for command in self.commands if " tail " in command]


def counting(lines: int, pause: str = "0.02") -> list[str]:
    """Name an agent that writes numbered lines."""
    return ["sh", "-c", f"i=0; while [ $i -lt {lines} ]; do i=$((i+1)); echo line $i; sleep {pause}; done"]


async def pushed(
    sandbox: Sandbox,
    wanted: SessionSpec,
    sink: Sink | None,
    on_event: Callable[[Event], None] | None = None,
    notes: list[str] | None = None,
) -> Result:
    """Open with a sink, invoke, close."""
    note = None if notes is None else notes.append
    async with open_session(sandbox, wanted, sink=sink, on_event=on_event, on_note=note) as session:
        await session.invoke(wanted.request("p"))
    assert session.result is not None
    return session.result


def whole(result: Result, lines: int) -> None:
    """Assert that every line of `counting` is there, once, with the receipt that fits."""
    assert (result.outcome, result.gaps) == (Outcome.COMPLETED, [])
    texts = [event.data["text"] for event in read_events(result.evidence) if event.kind == "log"]
    assert texts == [f"line {number}" for number in range(1, lines + 1)]


async def test_session_with_a_sink_asks_for_evidence_once(tmp_path: Path, box: Path) -> None:
    """After the first reply everything is pushed, the receipt included, and each event is delivered once."""
    sandbox, seen, notes = Conversations(LocalSandbox(box)), [], []
    async with listening(HERE) as sink:
        result = await pushed(
            sandbox, spec(tmp_path, *counting(100)), sink, on_event=lambda event: seen.append(event.seq), notes=notes
        )
    whole(result, 100)
    assert seen == list(range(1, result.events + 1))
    assert len(sandbox.tails) <= 1, sandbox.tails
    assert [note for note in notes if "evidence" in note] == ["the box's evidence is pushed"]
    assert remains(box) == []
