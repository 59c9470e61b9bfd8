# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Sessions in boxes without any network, whose model calls the controller makes: held execs, plain execs, lost controllers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from containers import Box, Containers
from plain_sandbox import Plain
from polling import eventually
from sample_repo import PROMPT, make_sample_repo
from scripted_model import Fault, ScriptedModel

from boxstrap.controller.collect import read_events
from boxstrap.controller.relay import CALLS_MAX, REQUEST_MAX, Caller
from boxstrap.controller.sandbox import Sandbox
from boxstrap.controller.sandboxes.docker import DockerSandbox
from boxstrap.controller.sandboxes.local import LocalSandbox
from boxstrap.controller.session import Result, SessionSpec, open_session
from boxstrap.runner.frames import FRAME_MAX, Frame, Type, Unpacker, pieces
from boxstrap.runner.wire import Event, Model, Outcome

KEY = "sk-canary-7f3a91c2d4e5"
ASK = str(Path(__file__).parent / "children" / "ask_model.py")


def spec(tmp_path: Path, url: str, **fields: Any) -> SessionSpec:
    """Say what a relayed session is."""
    model = Model(
        url=url.replace("/v1", "/ng-rollout/secret-prefix/v1"), name="scripted", headers={"Authorization": f"Bearer {KEY}"}
    )
    defaults = {"session_id": f"r{os.getpid()}-{tmp_path.name}", "out": tmp_path / "out", "model": model, "upstream": "relay"}
    return SessionSpec(**{**defaults, **fields})


async def once(sandbox: Sandbox, wanted: SessionSpec, prompt: str = "p") -> Result:
    """Open, invoke, close."""
    async with open_session(sandbox, wanted) as session:
        result = await session.invoke(wanted.request(prompt))
    return session.result or result


DISK = "/tmp /work /root /etc /var /opt"


def secrets_in(box: Box, where: str = "/tmp") -> str:
    """Name the files of a box that hold the host's key or path prefix: in folders, environments and command lines."""
    where += " /proc/[0-9]*/environ /proc/[0-9]*/cmdline"
    return box.exec(f"printf '%s\\n' {KEY[:9]}''{KEY[9:]} secret-''prefix | grep -rlsF -f - {where}").out.decode()


@pytest.mark.container
def test_search_for_secrets_finds_them(container: Containers) -> None:
    """The search itself: what it overlooks, the next test would promise."""
    box = container("task", network="none")
    box.check(f"echo x{KEY}x >/var/leak")
    assert secrets_in(box, DISK) == "/var/leak\n"


@pytest.mark.container
@pytest.mark.parametrize("transport", ["held", "plain"])
async def test_nooa_works_without_a_network_and_without_the_key(container: Containers, tmp_path: Path, transport: str) -> None:
    """The main job in a --network none box: the host's key and path prefix reach the model, and nothing in the box."""
    make_sample_repo(tmp_path / "bills")
    box = container("task", network="none")
    box.put(tmp_path / "bills", "/work/bills")
    sandbox: Sandbox = DockerSandbox(box.id)
    with ScriptedModel(strict=True) as model:
        wanted = spec(tmp_path, model.url, agent="nooa", workdir="/work/bills")
        seen: list[asyncio.Task[str]] = []

        def look(event: Event) -> None:
            if event.kind == "tool_call":  # while the agent works
                seen.append(asyncio.ensure_future(asyncio.to_thread(secrets_in, box)))

        async with open_session(sandbox if transport == "held" else Plain(sandbox), wanted, on_event=look) as session:
            result = await session.invoke(wanted.request(PROMPT))
            found = [*await asyncio.gather(*seen), secrets_in(box, DISK)]
        asked = list(model.calls)
    assert (result.outcome, result.gaps) == (Outcome.COMPLETED, []), result.detail
    assert box.check("git -C /work/bills status --porcelain --ignored") == " M bills/split.py"
    assert [call.headers["authorization"] for call in asked] == [f"Bearer {KEY}"] * 4
    assert {call.path for call in asked} == {"/ng-rollout/secret-prefix/v1/responses"}
    assert len(found) == 5
    assert set(found) == {""}
    assert KEY not in result.evidence.read_text()
    calls = [event.data for event in read_events(result.evidence) if event.kind == "model_call"]
    assert [call["status"] for call in calls] == [200] * 4


@pytest.fixture(params=["held", "plain"])
def local(request: pytest.FixtureRequest, tmp_path: Path) -> Sandbox:
    """A folder of this machine, by either transport."""
    sandbox = LocalSandbox(tmp_path / "box")
    return sandbox if request.param == "held" else Plain(sandbox)


def asking(tmp_path: Path, url: str, *words: str, **fields: Any) -> SessionSpec:
    """Say what a session of the opaque agent is."""
    return spec(tmp_path, url, agent="command", workdir="/tmp", argv=["python3", ASK, *words], **fields)


def told(result: Result) -> list[tuple[object, object]]:
    """Give status and error of each model call."""
    return [(event.data["status"], event.data["error"]) for event in read_events(result.evidence) if event.kind == "model_call"]


async def test_streams_and_many_calls_go_through_either_transport(local: Sandbox, tmp_path: Path) -> None:
    with ScriptedModel("chatter") as model:
        result = await once(local, asking(tmp_path, model.url, "--calls", "4", "--stream"))
        assert (result.outcome, told(result)) == (Outcome.COMPLETED, [(200, None)] * 4), result.detail
        assert len(model.calls) == 4
        assert all(call.headers["authorization"] == f"Bearer {KEY}" for call in model.calls)


@pytest.mark.parametrize(
    ("fault", "statuses"),
    [("500", [500] * 2), ("hang", [None] * 2), ("break", [200] * 2), ("401", [401]), ("refused", [None] * 2)],
)
async def test_failures_of_the_model_are_the_same_by_relay(tmp_path: Path, fault: str, statuses: list[int | None]) -> None:
    """What the controller meets, the agent meets; the outcome is the model's failure."""
    with ScriptedModel(faults=[] if fault == "refused" else [Fault.parse(fault)]) as model, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1" if fault == "refused" else model.url
        wanted = asking(tmp_path, url, "--retries", "1")
        assert wanted.model is not None
        result = await once(LocalSandbox(tmp_path / "box"), replace(wanted, model=replace(wanted.model, timeout_s=1.0)))
    assert result.outcome is Outcome.MODEL_FAILED
    assert [status for status, _ in told(result)] == statuses


async def test_budget_holds_on_the_host_as_well(local: Sandbox, tmp_path: Path) -> None:
    with ScriptedModel("chatter") as model:
        result = await once(local, asking(tmp_path, model.url, "--calls", "9", max_policy_calls=2))
        assert (result.outcome, len(model.calls)) == (Outcome.POLICY_BUDGET_EXHAUSTED, 2)


CONTROLLER = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from boxstrap.controller.cli import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.mark.container
def test_session_resumes_when_a_lost_controller_comes_back(container: Containers, tmp_path: Path) -> None:
    """Kill -9 in the middle of a call: that call fails, later ones wait, and the next controller of the session goes on."""
    box = container("task", network="none")
    box.put(Path(ASK), "/ask.py")
    (tmp_path / "prompt").write_text("p")
    with ScriptedModel("chatter", faults=[Fault.parse("slow=0.3")]) as model:
        words = ["run", "--docker", box.id, "--agent", "command", "--workdir", "/", "--prompt-file", str(tmp_path / "prompt")]
        words += ["--relay", "--model-url", model.url, "--model-header", f"X-Key={KEY}", "--allow-credentials"]
        words += [
            "--session",
            "lost",
            "--out",
            str(tmp_path / "out"),
            "--",
            "python3",
            "/ask.py",
            "--calls",
            "12",
            "--retries",
            "5",
        ]
        argv = [sys.executable, "-c", CONTROLLER, str(Path(__file__).parents[1] / "src"), *words]
        first = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        eventually(lambda: len(model.calls) >= 4, within_s=60)
        first.send_signal(signal.SIGKILL)
        first.wait()
        before = len(model.calls)
        last = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
        assert last.returncode == 0, last.stdout + last.stderr
        assert 12 <= len(model.calls) <= 13
        assert before < 12
        assert {call.headers["x-key"] for call in model.calls} == {KEY}
    calls = [event.data for event in read_events(tmp_path / "out" / "evidence.ndjson") if event.kind == "model_call"]
    assert {call["error"] for call in calls} <= {None, "relay_lost"}
    assert [call["seq"] for call in calls if call["error"] is None] == list(range(1, 13))


def asked(number: int, dialect: str, body: bytes = b"{}", headers: object = (), size: int | None = None) -> list[Frame]:
    """Make the frames of a request as a hostile box may send them."""
    head = {"dialect": dialect, "headers": list(headers) if isinstance(headers, tuple) else headers}
    head["bytes"] = len(body) if size is None else size
    return [Frame.of(Type.REQUEST, number, head), *(Frame(Type.BODY, number, piece) for piece in pieces(body))]


class Answers:
    """Collects what a Caller answers."""

    def __init__(self, caller: Caller) -> None:
        self.frames: list[Frame] = []
        self.more = asyncio.Event()
        caller.answer = self.take

    def take(self, frame: Frame) -> None:
        """Keep it."""
        self.frames.append(frame)
        self.more.set()

    async def ended(self, count: int) -> list[Frame]:
        """Wait until so many calls have ended."""
        while len(last := [frame for frame in self.frames if frame.type in {Type.END, Type.FAIL}]) < count:
            self.more.clear()
            await asyncio.wait_for(self.more.wait(), 10)
        return last


async def test_box_chooses_neither_host_nor_path_nor_credentials() -> None:
    """Whatever a request says, the controller calls its own URL with its own headers, or nothing."""
    with ScriptedModel("chatter") as model:
        caller = Caller(
            Model(url=model.url.replace("/v1", "/own/v1"), name="m", headers={"Authorization": "own"}), max_calls=None
        )
        answers = Answers(caller)
        hostile = [["host", "evil"], ["authorization", "stolen"], ["cookie", "c"], ["x-http-method-override", "PUT"]]
        hostile += [["content-type", "application/json"], ["accept", "*/*"], ["transfer-encoding", "chunked"]]
        frames = asked(1, "responses", b'{"model":"chatter","input":"x"}', hostile)
        for number, dialect in enumerate(["../../admin", "http://evil/", "", "responses/../x", "RESPONSES"], start=2):
            frames += asked(number, dialect)
        frames += [Frame.of(Type.REQUEST, 20, {"dialect": "responses"}), Frame(Type.REQUEST, 21, b"\xff"), Frame(Type.END, 1)]
        frames += [Frame(Type.BODY, 99, b"x"), Frame(Type.CANCEL, 98), *asked(22, "responses", b"{}", "no list", size=1)]
        for frame in frames:
            caller.take(frame)
        ended = {frame.call: frame.type for frame in await answers.ended(9)}
        await caller.aclose()
        assert ended == {1: Type.END, **dict.fromkeys([2, 3, 4, 5, 6, 20, 21, 22], Type.FAIL)}
        assert [(call.method, call.path) for call in model.requests] == [("POST", "/own/v1/responses")]
        seen = model.calls[0].headers
        assert (seen["authorization"], seen["host"]) == ("own", model.url.split("/")[2])
        assert not {"cookie", "x-http-method-override", "transfer-encoding"} & set(seen)


async def test_box_cannot_make_the_host_hold_more_than_its_caps() -> None:
    """Too many calls, too large a body, and a body that never comes are refused or cost nothing."""
    with ScriptedModel("chatter", faults=[Fault.parse("hang")]) as model:
        caller = Caller(Model(url=model.url, name="m"), max_calls=None)
        answers = Answers(caller)
        for frame in asked(1, "responses", size=REQUEST_MAX + 1):
            caller.take(frame)
        for number in range(2, 12):
            caller.take(asked(number, "responses", b"", size=REQUEST_MAX)[0])
        assert len(await answers.ended(7)) == 7  # one too large, and six beyond the four that fit
        caller.drop()
        for number in range(20, 21 + CALLS_MAX):
            for frame in asked(number, "responses"):
                caller.take(frame)
        assert (await answers.ended(8))[-1].call == 20 + CALLS_MAX
        await caller.aclose()


def test_frames_survive_every_cut_and_refuse_nonsense() -> None:
    frames = [Frame(Type.BODY, 7, b"x" * size) for size in (0, 1, 1000)] + [Frame.of(Type.HEAD, 2**32 - 1, {"status": 200})]
    stream = b"".join(frame.packed() for frame in frames)
    for step in (1, 7, 1009, len(stream)):
        unpacker = Unpacker()
        assert [frame for at in range(0, len(stream), step) for frame in unpacker.feed(stream[at : at + step])] == frames
    for nonsense in (b"HTTP/1.1 200 OK\r\n\r\n", (FRAME_MAX + 1).to_bytes(4, "big") + b"\x01aaaa", b"\0\0\0\0\x63aaaa"):
        with pytest.raises(ValueError, match=r"found|valid"):
            list(Unpacker().feed(nonsense))
