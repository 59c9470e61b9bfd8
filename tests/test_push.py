# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Evidence that the box pushes, beside the pull: whatever breaks, each event is delivered once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from containers import Containers, InternalNetwork
from plain_sandbox import Plain
from polling import eventually
from sink_line import cut_sink
from test_lifecycle import remains
from test_session import Counting, spec
from test_supervisor import pids_below

from boxstrap.controller import cli
from boxstrap.controller.budgets import Budgets
from boxstrap.controller.collect import read_events
from boxstrap.controller.listening import listening
from boxstrap.controller.sandbox import Sandbox
from boxstrap.controller.sandboxes.docker import DockerSandbox
from boxstrap.controller.sandboxes.local import LocalSandbox
from boxstrap.controller.session import Result, Session, SessionSpec, open_session
from boxstrap.controller.sink import Sink
from boxstrap.runner.wire import Event, Outcome

HERE = "http://127.0.0.1:0"
PUSHED, PULLED = "the box's evidence is pushed", "nothing is pushed: the evidence is pulled"


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


class Heard:
    """Keeps what was delivered, and tells when the agent has written so many lines."""

    def __init__(self) -> None:
        self.seqs: list[int] = []
        self.lines = 0
        self.notes: list[str] = []
        self.invoked_at = 0.0
        self._more = asyncio.Event()

    def event(self, event: Event) -> None:
        """Count."""
        self.seqs.append(event.seq)
        self.lines += event.kind == "log"
        self._more.set()

    def note(self, text: str) -> None:
        """Keep what is told of the way."""
        if "evidence" in text:
            self.notes.append(text)
            self._more.set()

    async def until(self, lines: int, *notes: str) -> None:
        """Wait for the agent's n-th line, and for these notes."""
        async with asyncio.timeout(60):
            while self.lines < lines or self.notes[: len(notes)] != list(notes):
                self._more.clear()
                await self._more.wait()


def counting(lines: int, pause: str = "0.02") -> list[str]:
    """Name an agent that writes numbered lines."""
    return ["sh", "-c", f"i=0; while [ $i -lt {lines} ]; do i=$((i+1)); echo line $i; sleep {pause}; done"]


async def pushed(sandbox: Sandbox, wanted: SessionSpec, sink: Sink | None, heard: Heard) -> Result:
    """Open with a sink, invoke, close."""
    async with open_session(sandbox, wanted, sink=sink, on_event=heard.event, on_note=heard.note) as session:
        await session.invoke(wanted.request("p"))
        heard.invoked_at = time.monotonic()
    assert session.result is not None
    return session.result


def whole(result: Result, heard: Heard, lines: int) -> None:
    """Assert that every line of `counting` is there and every event was delivered, once, and that the receipt agrees."""
    assert (result.outcome, result.gaps) == (Outcome.COMPLETED, [])
    events = list(read_events(result.evidence))
    assert [event.data["text"] for event in events if event.kind == "log"] == [f"line {n}" for n in range(1, lines + 1)]
    assert heard.seqs == [event.seq for event in events] == list(range(1, len(events) + 1))


def nothing_left(box: Path, wanted: SessionSpec) -> None:
    """Assert that no process knows of the session any more, and no folder: the watchdog goes as soon as it has told the end."""
    eventually(lambda: not pids_below(f"/{wanted.session_id}"), within_s=2)
    assert remains(box) == []


async def test_session_with_a_sink_asks_for_its_beginning_and_its_end_only(tmp_path: Path, box: Path) -> None:
    """In between everything is pushed; the evidence does not say how it came."""
    sandbox, heard, wanted = Conversations(LocalSandbox(box)), Heard(), spec(tmp_path, *counting(100))
    async with listening(HERE) as sink:
        result = await pushed(sandbox, wanted, sink, heard)
    whole(result, heard, 100)
    assert len(sandbox.tails) <= 2, sandbox.tails
    assert heard.notes == [PUSHED]
    assert b"sink" not in result.evidence.read_bytes()
    nothing_left(box, wanted)


async def test_long_silence_of_the_agent_is_none_of_the_box(tmp_path: Path, box: Path) -> None:
    """The pusher beats while nothing happens: nobody asks."""
    sandbox, heard, wanted = Conversations(LocalSandbox(box)), Heard(), spec(tmp_path, *counting(2, "4"))
    async with listening(HERE) as sink:
        whole(await pushed(sandbox, wanted, sink, heard), heard, 2)
    assert len(sandbox.tails) <= 2, sandbox.tails


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "https://127.0.0.1:1/x", "http://no.such.host.invalid"])
async def test_sink_that_the_box_does_not_reach_is_no_matter(tmp_path: Path, box: Path, url: str) -> None:
    """The same evidence by pull, said once, and the end is not held up."""
    heard, wanted = Heard(), spec(tmp_path, *counting(20))
    begun = time.monotonic()
    whole(await pushed(LocalSandbox(box), wanted, Sink(url), heard), heard, 20)
    assert time.monotonic() - begun < 15
    assert heard.notes == [PULLED]
    nothing_left(box, wanted)


@pytest.mark.parametrize("plain", [False, True])
async def test_sink_that_goes_and_comes_back_is_bridged_by_pull(tmp_path: Path, box: Path, *, plain: bool) -> None:
    """In mid-session, with a sandbox that converses and with one that can do no more than exec."""
    sandbox, heard, wanted = Conversations(LocalSandbox(box)), Heard(), spec(tmp_path, *counting(250))
    async with cut_sink() as (sink, line):
        running = asyncio.create_task(pushed(Plain(sandbox) if plain else sandbox, wanted, sink, heard))
        await heard.until(20)
        line.cut()
        before = heard.lines
        await heard.until(before + 50)
        asked = len(sandbox.tails)
        line.mend()
        whole(await asyncio.wait_for(running, 60), heard, 250)
    assert asked > 0
    assert heard.notes == [PUSHED, PULLED, PUSHED]
    nothing_left(box, wanted)


async def test_acknowledgements_that_are_lost_cost_nothing_but_a_repetition(tmp_path: Path, box: Path) -> None:
    """The sink has taken it and the box does not hear so, again and again, the last one too."""
    heard, wanted = Heard(), spec(tmp_path, *counting(200))
    async with cut_sink() as (sink, line):
        running = asyncio.create_task(pushed(LocalSandbox(box), wanted, sink, heard))
        for lines in range(5, 195, 10):
            await heard.until(lines)
            line.lose(1)
        await heard.until(195)
        line.lose(4)
        whole(await asyncio.wait_for(running, 60), heard, 200)
        assert line.lost > 10
    nothing_left(box, wanted)


async def test_restarted_controller_is_pushed_the_rest(tmp_path: Path, box: Path) -> None:
    """The first vanishes with its sink; the second is found at another port, by another token, and gets what is missing."""
    heard, wanted = Heard(), spec(tmp_path, *counting(300))
    async with listening(HERE) as sink:
        first = Session(LocalSandbox(box), wanted, sink=sink, on_event=heard.event, on_note=heard.note)
        await first.open()
        running = asyncio.create_task(first.invoke(wanted.request("p")))
        await heard.until(30)
        assert first._running is not None
        first._running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    first.collector.close()
    async with listening(HERE) as sink:
        whole(await pushed(LocalSandbox(box), wanted, sink, heard), heard, 300)
    assert (heard.notes[0], heard.notes[-1]) == (PUSHED, PUSHED)
    nothing_left(box, wanted)


@pytest.mark.parametrize(("who", "outcome"), [("watchdog", Outcome.COMPLETED), ("pid", Outcome.SANDBOX_LOST)])
async def test_killed_keeper_ends_as_without_a_push(tmp_path: Path, box: Path, who: str, outcome: Outcome) -> None:
    """Kill -9 of the process that pushes, and of the one that it watches."""
    heard, wanted = Heard(), spec(tmp_path, *counting(150))
    async with listening(HERE) as sink, asyncio.timeout(60):
        running = asyncio.create_task(pushed(LocalSandbox(box), wanted, sink, heard))
        await heard.until(20)
        said = json.loads((box / "tmp" / "nemo-gym-command" / wanted.session_id / "supervisor.json").read_text())
        os.kill(said[who][0] if who == "watchdog" else said[who], signal.SIGKILL)
        result = await running
    assert result.outcome is outcome
    if outcome is Outcome.COMPLETED:
        whole(result, heard, 150)
    assert heard.seqs == list(range(1, len(heard.seqs) + 1))
    nothing_left(box, wanted)


async def test_slow_consumer_holds_the_box_and_not_the_hosts_memory(tmp_path: Path, box: Path) -> None:
    """20 MB at once, and a consumer that takes its time: no more than one batch is on its way."""
    heard, wanted = Heard(), spec(tmp_path, "sh", "-c", "yes 'some words of an agent, again and again' | head -n 200000")
    held: list[int] = []

    def slow(event: Event) -> None:
        heard.event(event)
        if event.seq % 2000 == 0:
            time.sleep(0.02)  # a consumer that blocks
            held.append(sum(len(inbox._line or "") for inbox in sink._inboxes.values()))

    async with listening(HERE) as sink, open_session(LocalSandbox(box), wanted, sink=sink, on_event=slow) as session:
        result = await session.invoke(wanted.request("p"))
    assert (result.outcome, result.gaps, heard.lines) == (Outcome.COMPLETED, [], 200_000)
    assert max(held) < 2_000_000


LIAR = r"""
import base64, http.client, json, sys, urllib.parse
sink = json.load(open(sys.argv[1]))
url = urllib.parse.urlsplit(sink["url"])
tail = {"v": 1, "start": 0, "next": 0, "size": 0, "chunk": "", "state": "running", "claim": sys.argv[2]}
lies = {
    "nonsense": ("[" * 100000, {}, {**tail, "start": 10**15}, {**tail, "chunk": "!"}, {**tail, "next": -1}, tail),
    "its end": [{**tail, "state": state} for state in ("ended", "lost", "absent")],
}
while True:
    for lie in lies[sys.argv[3]]:
        try:
            talk = http.client.HTTPConnection(url.hostname, url.port, timeout=30)
            body = lie if isinstance(lie, str) else json.dumps(lie)
            talk.request("POST", url.path, body=body, headers={"Authorization": "Bearer " + sink["token"]})
            talk.getresponse().read()
        except (OSError, http.client.HTTPException):
            pass
"""


@pytest.mark.parametrize("lies", ["nonsense", "its end"])
async def test_agent_that_pushes_lies_by_the_sessions_token_hides_nothing(tmp_path: Path, box: Path, lies: str) -> None:
    """It finds the token in the box. What is no batch moves nothing, and whether all has ended is asked for."""
    heard, name = Heard(), f"liar-{os.getpid()}-{lies[:3]}"
    file = box / "tmp" / "nemo-gym-command" / name / "sink.json"
    claim = f"$(readlink {file.parent}/launch.claim)"
    (tmp_path / "liar.py").write_text(LIAR)
    lying = f"{sys.executable} {tmp_path}/liar.py {file} {claim} '{lies}' & "
    wanted = spec(tmp_path, "sh", "-c", lying + counting(150)[2], session_id=name)
    async with listening(HERE) as sink:
        whole(await asyncio.wait_for(pushed(LocalSandbox(box), wanted, sink, heard), 60), heard, 150)
    assert remains(box) == []


async def test_cancelled_session_leaves_no_token_that_opens_anything(tmp_path: Path, box: Path) -> None:
    heard, wanted = Heard(), spec(tmp_path, "sh", "-c", "echo on; exec sleep 600")
    async with listening(HERE) as sink:
        running = asyncio.create_task(pushed(LocalSandbox(box), wanted, sink, heard))
        await heard.until(1)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert sink._inboxes == {}
    assert not (wanted.out / ".sink.json").exists()
    nothing_left(box, wanted)


def test_command_is_pushed_to_where_it_is_told(tmp_path: Path, box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path of the URL is kept; https, for which a plain listener has no certificate, is refused before anything starts."""
    (tmp_path / "prompt").write_text("p")
    words = ["run", "--local", str(box), "--agent", "command", "--workdir", "/tmp", "--prompt-file", str(tmp_path / "prompt")]
    words += ["--session", f"cli-{os.getpid()}", "--out", str(tmp_path / "out")]
    assert cli.main([*words, "--push", "http://127.0.0.1:0/some/path", "--", *counting(20)]) == 0
    assert PUSHED in " ".join(capsys.readouterr().out.split())
    assert cli.main([*words, "--push", "https://127.0.0.1:0", "--", "true"]) == 64
    assert "certificate" in capsys.readouterr().err


@pytest.mark.container
async def test_container_on_a_network_pushes_to_the_host(
    container: Containers, internal_network: InternalNetwork, tmp_path: Path
) -> None:
    """A bridge's gateway is the host: the address at which a box reaches its controller."""
    sandbox, heard = Conversations(DockerSandbox(container("debian:12", network=internal_network.name).id)), Heard()
    async with listening(f"http://{internal_network.host}:0") as sink:
        whole(await pushed(sandbox, spec(tmp_path, *counting(100)), sink, heard), heard, 100)
    assert len(sandbox.tails) <= 2
    assert heard.notes == [PUSHED]


@pytest.mark.container
@pytest.mark.parametrize("how", ["kill", "pause", "remove"])
async def test_lost_container_that_pushed_is_named_within_seconds(
    container: Containers, internal_network: InternalNetwork, tmp_path: Path, how: str
) -> None:
    box, heard = container("debian:12", network=internal_network.name), Heard()
    wanted = spec(tmp_path, "sh", "-c", "echo written; exec sleep 600", budgets=Budgets().with_worker(900.0))
    async with listening(f"http://{internal_network.host}:0") as sink:
        running = asyncio.create_task(pushed(DockerSandbox(box.id), wanted, sink, heard))
        await heard.until(1, PUSHED)
        begun = time.monotonic()
        await asyncio.to_thread(getattr(box, how))
        result = await asyncio.wait_for(running, 40)
    assert result.outcome is Outcome.SANDBOX_LOST
    assert heard.invoked_at - begun < 12  # at most five of silence, and three of patience with what may be a moment
    assert "written" in [event.data.get("text") for event in read_events(result.evidence)]
