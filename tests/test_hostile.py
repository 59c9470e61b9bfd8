# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""DESIGN 14: what a sandbox that lies, floods and plants can do to the controller, which is nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_collect import line, reply
from test_lifecycle import Meddling
from test_session import once, spec

from boxstrap.controller import box
from boxstrap.controller.collect import GAPS_MAX, Collector, read_events
from boxstrap.controller.errors import EvidenceError, SandboxLost
from boxstrap.controller.sandboxes.local import LocalSandbox
from boxstrap.controller.sandboxes.output import Output
from boxstrap.controller.session import Session, open_session
from boxstrap.runner.wire import EVIDENCE_LINE_MAX, Outcome, Receipt, Survivor, Tail, to_json

SOURCES = str(Path(__file__).parents[1] / "src")


def mutated(chance: random.Random, seed: bytes) -> bytes:
    """Break a line in one of the ways that lines break, or that someone breaks them."""
    at = chance.randrange(len(seed) + 1)
    versions = [b'"v":2', b'"v":1,"v":1', b'"v":true', b'"v":1.0', b'"__class__":"x"']
    numbers = [b"NaN,", b"-1", b"1e9", b"99999999999999999999", b'"', b"null"]
    ways = (
        lambda: seed[:at] + bytes([chance.randrange(256)]) + seed[at + 1 :],
        lambda: seed[:at] + seed[at + chance.randrange(1, 30) :],
        lambda: seed[:at] + chance.randbytes(chance.randrange(1, 20)) + seed[at:],
        lambda: seed[:at],
        lambda: seed.replace(b'"seq":', b'"seq":' + chance.choice(numbers)),
        lambda: seed.replace(b'"data":{', b'"data":{"a":1,"a":2,"\\u0000":"\\ud800\\u001b[2J",'),
        lambda: b"[" * chance.randrange(1, 3000) + b"]" * chance.randrange(3000),
        lambda: seed.replace(b'"v":1', chance.choice(versions)),
        lambda: chance.randbytes(chance.randrange(200)),
    )
    return chance.choice(ways)()


def test_collector_takes_a_hundred_thousand_broken_lines_and_replies(tmp_path: Path) -> None:
    """Nothing but EvidenceError comes out, numbers only rise, what was accepted is on disk byte for byte, memory is bounded."""
    chance = random.Random(20260)
    seen: list[int] = []
    collector = Collector(tmp_path, lambda event: seen.append(event.seq))
    accepted = hashlib.sha256()
    inputs = 0
    for _ in range(1000):
        good = [line(chance.randrange(1, 400_000), "x" * chance.randrange(30)) for _ in range(20)]
        pieces = [chance.choice(good) if chance.random() < 0.1 else mutated(chance, chance.choice(good)) for _ in range(80)]
        data = b"\n".join(pieces)
        collector.feed(reply(collector.offset, data))
        accepted.update(data)
        inputs += len(pieces)
        whole = reply(collector.offset, line(1)).encode()
        for _ in range(25):
            inputs += 1
            before = collector.offset
            try:
                collector.feed(mutated(chance, whole).decode("utf-8", "replace"))
            except EvidenceError:
                assert collector.offset == before
            else:
                with collector.path.open("rb") as file:
                    file.seek(before)
                    accepted.update(file.read())
    assert inputs >= 100_000
    assert seen == sorted(set(seen))
    assert len(collector.gaps) == GAPS_MAX
    assert len(collector._rest) <= EVIDENCE_LINE_MAX
    assert collector.sha256() == accepted.hexdigest()
    collector.close()


FLOOD = r"""
import os, sys
w = sys.stdout.buffer.write
w(b"\x1b]0;owned\x07\x1b[2J\x1b[31mred\r\n")
w(b"nul\0nul \xff\xfe\xc3\x28 invalid\n")
w(b"x" * 50_000_000 + b"\n")
w(b"y" * 50_000_000 + b"\n")
for n in range(20000): w(b"%d\n" % n)
w(b"no end")
"""

MEASURED = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from test_session import once, spec
from boxstrap.controller.sandboxes.docker import DockerSandbox
from boxstrap.controller.sandboxes.local import LocalSandbox
out = Path(sys.argv[3])
wanted = spec(out, sys.argv[4], "-I", "-c", sys.argv[5], session_id="flood")
result = asyncio.run(once(DockerSandbox(sys.argv[6]) if sys.argv[6] else LocalSandbox(out.parent / "box"), wanted))
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
print(result.outcome.value, int(peak.split()[1]) // 1024)  # not ru_maxrss: it outlives exec, and is what pytest had
"""


@pytest.mark.parametrize("where", ["", pytest.param("task", marks=pytest.mark.container)])
def test_flood_of_output_costs_the_host_neither_memory_nor_meaning(
    tmp_path: Path, request: pytest.FixtureRequest, where: str
) -> None:
    """Two lines of 50 MB, escapes, NULs, bytes that are no UTF-8: bounded, and said. Measured in a process of its own."""
    base = tmp_path / "base"
    base.mkdir()
    box = request.getfixturevalue("container")(where, network="none").id if where else ""
    python = "python3" if where else sys.executable
    argv = [sys.executable, "-c", MEASURED, SOURCES, str(Path(__file__).parent), str(base), python, FLOOD, box]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    outcome, peak_mib = done.stdout.split()
    assert (outcome, int(peak_mib) < 200) == ("completed", True), done.stdout
    events = list(read_events(base / "out" / "evidence.ndjson"))
    texts = [event.data["text"] for event in events if event.kind == "log" and "text" in event.data]
    assert texts[:2] == ["\x1b]0;owned\x07\x1b[2J\x1b[31mred\r", "nul\0nul \ufffd\ufffd\ufffd( invalid"]
    assert texts[-20001:] == [*map(str, range(20000)), "no end"]
    assert any(event.kind == "gap" and event.data["code"] == "line_too_long" and event.data["lines"] == 2 for event in events)
    assert b"\x1b" not in (base / "out" / "evidence.ndjson").read_bytes()
    assert sorted(path.name for path in base.iterdir()) == ["out"]


async def test_artifacts_come_out_by_digest_and_only_if_they_are_what_they_say(tmp_path: Path, warm: Path) -> None:
    """A genuine one is kept; a false one, an endless one, a FIFO, a link are gaps; what else lies there is not looked at."""
    folder = warm / "tmp" / "nemo-gym-command" / "art" / "artifacts"
    false, endless, fifo, link = ("f" * 64, "e" * 64, "d" * 64, "c" * 64)
    script = f"""
head -c 400000 /dev/zero | tr '\\0' x; echo
mkdir -p {folder}; cd {folder} || exit 1; i=0; while [ $i -lt 3000 ]; do i=$((i+1)); echo > many-$i; done
echo false > {false}; truncate -s 1T {endless}; mkfifo {fifo}; ln -s /etc/passwd {link}
"""
    named = [false, endless, fifo, link, "../../../etc/passwd", "/etc/passwd", "A" * 64]

    class Adding(Meddling):
        async def exec(self, command: str, **how: Any) -> Output:
            """Add events that name artifacts, as an agent that writes the evidence file could."""
            done = await super().exec(command, **how)
            if " tail " in command and not self.added and '"state":"ended"' in done.stdout:
                tail = json.loads(done.stdout)
                data = base64.b64decode(tail["chunk"])
                for number, name in enumerate(named, 100_000):
                    data += line(number).replace(b'"text":"x"', b'"artifact":"' + name.encode() + b'"')
                self.added = True
                end = tail["start"] + len(data)
                chunk = base64.b64encode(data).decode()
                return replace(done, stdout=json.dumps({**tail, "chunk": chunk, "next": end, "size": end}))
            return done

        added = False

    result = await once(Adding(warm), spec(tmp_path, "sh", "-c", script, session_id="art"))
    kept = sorted(path.name for path in (tmp_path / "out" / "artifacts").iterdir())
    assert len(kept) == result.artifacts == 1
    body = (tmp_path / "out" / "artifacts" / kept[0]).read_bytes()
    assert hashlib.sha256(body).hexdigest() == kept[0]
    assert json.loads(body)["text"] == "x" * 400000
    assert result.outcome is Outcome.COMPLETED
    missing = [gap.detail.partition(":")[0] for gap in result.gaps if gap.code == "artifact_missing"]
    assert sorted(missing) == sorted([false, endless, fifo, link])


async def test_artifact_that_was_refused_for_a_moment_is_asked_for_again(tmp_path: Path, warm: Path) -> None:
    """As a container that is being restarted does."""
    refusals = iter([OSError("the engine refused"), OSError("the engine refused")])

    def meddle(n: int, command: str) -> Output | None:
        del n
        if command.startswith("download") and (refusal := next(refusals, None)):
            raise refusal
        return None

    script = "head -c 400000 /dev/zero | tr '\\0' x; echo"
    result = await once(Meddling(warm, meddle), spec(tmp_path, "sh", "-c", script, session_id="again"))
    assert (result.outcome, result.artifacts, result.gaps) == (Outcome.COMPLETED, 1, [])


async def test_artifact_that_could_not_be_fetched_is_fetched_before_the_folder_goes(tmp_path: Path, warm: Path) -> None:
    """The line is cut just when the payloads should come out; closing is refused until it is back, and then they are there."""
    away = True

    def meddle(n: int, command: str) -> Output | None:
        del n
        if away and command.startswith("download"):
            raise ConnectionError("cut")
        return None

    script = "head -c 400000 /dev/zero | tr '\\0' x; echo"
    session = Session(Meddling(warm, meddle), spec(tmp_path, "sh", "-c", script, session_id="later"))
    await session.open()
    result = await session.invoke(session.spec.request("p"))
    assert (result.outcome, result.artifacts) == (Outcome.COMPLETED, 0)
    with pytest.raises(SandboxLost):
        await session.close()
    away = False
    closed = await session.close()
    assert closed is not None
    assert (closed.outcome, closed.artifacts, closed.gaps) == (Outcome.COMPLETED, 1, [])
    assert len(list((tmp_path / "out" / "artifacts").iterdir())) == 1


RECEIPT = Receipt(
    session_id="s", request_digest="0" * 64, agent="command", started_at=1.0, ended_at=2.0, exit_code=0, signal=None, status="",
    detail="", timed_out=False, stopped=False, oom_killed=False, supervisor_lost=False, cleanup_confirmed=True,
    survivors=[Survivor(pid=1, name="x")], reaped=1, evidence_bytes=0, evidence_sha256="", stdout_bytes=0, stderr_bytes=0,
    output_truncated=False, peak_rss_bytes=0, cpu_seconds=0.0,
)  # fmt: skip
TAIL = Tail(start=0, next=0, size=0, chunk="", state="running", claim="")
HUGE = base64.b64encode(b"z" * 3_000_000).decode()


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A box in which the runtime is installed once for all of these."""
    return tmp_path_factory.mktemp("warm")


@pytest.mark.parametrize(
    ("name", "says", "outcome"),
    [
        ("nonsense", "\x1b[2J" * 1000, Outcome.SANDBOX_LOST),
        ("nothing", "", Outcome.SANDBOX_LOST),
        ("deep", "[" * 200_000, Outcome.SANDBOX_LOST),
        ("nan", to_json(TAIL).replace('"size":0', '"size":NaN'), Outcome.SANDBOX_LOST),
        ("running for ever", to_json(TAIL), Outcome.SANDBOX_LOST),
        ("ended, and more to come, for ever", to_json(replace(TAIL, state="ended", size=10**15)), Outcome.SANDBOX_LOST),
        ("another session's receipt", to_json(replace(TAIL, state="ended", receipt=RECEIPT)), Outcome.SANDBOX_LOST),
        ("lost for ever", to_json(replace(TAIL, state="lost")), Outcome.SANDBOX_LOST),
        ("endless", "endless", Outcome.SANDBOX_LOST),
    ],
)
async def test_replaced_archive_may_answer_anything(
    tmp_path: Path, warm: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str, outcome: Outcome
) -> None:
    """The agent is root in there: each verb may say anything, for ever. The controller ends, names it, and stays bounded."""
    monkeypatch.setattr(box, "PATIENCE_S", 0.5)
    monkeypatch.setattr(box, "STOP_MARGIN_S", 0.2)
    monkeypatch.setattr("boxstrap.controller.session.STOP_MARGIN_S", 0.2)
    monkeypatch.setattr("boxstrap.controller.collect.EVIDENCE_MAX", 20_000_000)
    asked: list[str] = []

    def meddle(n: int, command: str) -> Output | None:
        del n
        if " tail " not in command:
            return None
        start = int(command.partition("--from ")[2].split()[0])
        endless = replace(TAIL, start=start, next=start + 3_000_000, size=10**15, chunk=HUGE)
        text = to_json(endless) if says == "endless" else says
        asked.append(command)
        return Output(stdout=text, stderr="", return_code=0)

    wanted = spec(tmp_path, "sh", "-c", "exec sleep 600")
    request = replace(wanted.request("p"), deadline_s=0.2, grace_s=0.1)
    sandbox = Meddling(warm, meddle)
    async with open_session(sandbox, wanted) as session:
        result = await session.invoke(request)
    assert result.outcome is outcome, name
    assert len(asked) < 60
    if "another" in name:
        assert "foreign_receipt" in {gap.code for gap in result.gaps}
    assert result.evidence.stat().st_size <= 20_000_000
    assert list((warm / "tmp").glob("nemo-gym-command/*")) == []


async def test_evidence_that_was_replaced_by_a_link_brings_nothing_out(tmp_path: Path, warm: Path) -> None:
    """evidence.ndjson becomes a link to a secret of the box's owner, then a FIFO: nothing of it is read, and nothing waits."""
    secret = tmp_path / "secret"
    secret.write_text("canary\n" * 1000)
    here = warm / "tmp" / "nemo-gym-command" / "planted"
    script = f"echo before; sleep 0.3; rm {here}/evidence.ndjson; ln -s {secret} {here}/evidence.ndjson; echo after"
    result = await once(LocalSandbox(warm), spec(tmp_path, "sh", "-c", script, session_id="planted"))
    assert b"canary" not in result.evidence.read_bytes()
    assert "receipt_mismatch" in {gap.code for gap in result.gaps}
    assert result.outcome is Outcome.COMPLETED


def test_host_folder_is_not_written_through_a_link(tmp_path: Path) -> None:
    """Whoever could plant a link in the host's own folder gets an error, not a write elsewhere."""
    with tempfile.TemporaryDirectory() as elsewhere:
        (tmp_path / "evidence.ndjson").symlink_to(Path(elsewhere, "target"))
        with pytest.raises(OSError, match="ymbolic"):
            Collector(tmp_path)
        assert list(Path(elsewhere).iterdir()) == []
