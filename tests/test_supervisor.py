# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The runner for real: real children, real signals, and a scan of /proc that shares no code with the reaper."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from polling import eventually

from boxstrap.runner.layout import RuntimePaths
from boxstrap.runner.wire import Outcome, Receipt, Request, Survivor, outcome_of, to_json

CHILD = str(Path(__file__).parent / "children" / "stubborn.py")
SOURCES = Path(__file__).parents[1] / "src"
START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from boxstrap.runner.__main__ import main; sys.exit(main())"


class Runner:
    """One session folder and the verbs on it, each in a process of its own as in a box; on a runtime, or on this Python."""

    def __init__(self, folder: Path, runtime: RuntimePaths | None = None) -> None:
        self.folder = folder
        self._python = [sys.executable, str(SOURCES)] if runtime is None else [runtime.python, runtime.app]
        self.started: list[subprocess.Popen[bytes]] = []

    def request(self, *argv: str, **fields: Any) -> Request:
        """Write a request for agent `command` and return it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        defaults: dict[str, Any] = {"deadline_s": 60.0, "grace_s": 0.3, "workdir": str(self.folder.parent), "agent": "command"}
        defaults |= {"prompt": "p", "argv": list(argv)}
        request = Request(session_id=self.folder.name, **{**defaults, **fields})
        (self.folder / "request.json").write_text(to_json(request))
        return request

    def start(self, verb: str, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a verb."""
        python, sources = self._python
        argv = [python, "-I", "-c", START, sources, verb, "--session", str(self.folder), *words]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
        self.started.append(process)
        return process

    def verb(self, verb: str, *words: str, env: dict[str, str] | None = None) -> tuple[int, Any]:
        """Run a verb to its end and return (exit status, its JSON)."""
        process = self.start(verb, *words, "--json", env=env)
        out, err = process.communicate(timeout=60)
        assert out, err.decode()
        return process.returncode, json.loads(out)

    def run(self, *words: str) -> tuple[int, Receipt]:
        """Run the session to its end and return (exit status, receipt)."""
        status, answer = self.verb("run", *words)
        assert answer["ok"], answer
        return status, self.receipt()

    def end(self) -> None:
        """Stop the session, and kill the verbs that still run."""
        self.verb("stop")
        for process in self.started:
            process.kill()
            process.communicate()

    def receipt(self) -> Receipt:
        """Read the receipt."""
        plain = json.loads((self.folder / "receipt.json").read_text())
        return Receipt(**{**plain, "survivors": [Survivor(**one) for one in plain["survivors"]]})

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Read the evidence, or one kind of it."""
        events = [json.loads(line) for line in (self.folder / "evidence.ndjson").read_text().splitlines()]
        return [event for event in events if kind in {None, event["kind"]}]

    def ready(self) -> bool:
        """Whether the child said `ready`."""
        out = self.folder / "agent.out"
        return out.exists() and b"ready" in out.read_bytes()

    def supervisor(self) -> int:
        """Return the supervisor's pid."""
        return int(json.loads((self.folder / "supervisor.json").read_text())["pid"])


def pids_below(text: str) -> list[int]:
    """Find processes by what their command line or environment holds: an oracle that knows nothing of the reaper."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) != os.getpid():
            try:
                raw = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in raw:
                found.append(int(entry.name))
    return found


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path / "sessions" / f"s{os.getpid()}-{tmp_path.name}"[:100])
    yield runner
    runner.end()


@pytest.mark.parametrize("code", [0, 1, 3, 124, 125, 126, 137, 255])
def test_exit_code_is_told_as_it_was(runner: Runner, code: int) -> None:
    runner.request("sh", "-c", f"exit {code}")
    _, receipt = runner.run()
    assert (receipt.exit_code, receipt.signal) == (code, None)
    assert outcome_of(receipt) is (Outcome.COMPLETED if code == 0 else Outcome.AGENT_FAILED)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGUSR1])
def test_fatal_signal_is_told_apart_from_an_exit_code(runner: Runner, number: signal.Signals) -> None:
    runner.request("sh", "-c", f"kill -{int(number)} $$")
    _, receipt = runner.run()
    assert (receipt.exit_code, receipt.signal) == (None, int(number))
    assert outcome_of(receipt) is Outcome.AGENT_FAILED


def test_every_daemon_is_reaped_when_the_agent_ends(runner: Runner) -> None:
    """Double fork, setsid, closed descriptors, scrubbed environment, TERM ignored: none survives, and the receipt is true."""
    marker = runner.folder.name
    runner.request(sys.executable, CHILD, "daemons", env={"ORACLE": marker})
    status, receipt = runner.run()
    assert status == 0
    assert receipt.cleanup_confirmed
    assert receipt.reaped >= 6
    assert pids_below(marker) == []
    assert pids_below("signal.signal(15, 1); time.sleep(600)") == []


@pytest.mark.parametrize("scenario", ["ignore-term", "spin", "sleep"])
def test_deadline_ends_an_agent_that_does_not_want_to(runner: Runner, scenario: str) -> None:
    runner.request(sys.executable, CHILD, scenario, deadline_s=0.6)
    _, receipt = runner.run()
    assert receipt.timed_out
    assert receipt.cleanup_confirmed
    assert receipt.signal == (signal.SIGTERM if scenario == "sleep" else signal.SIGKILL)
    assert outcome_of(receipt) is Outcome.DEADLINE_EXCEEDED


def test_grandchild_that_holds_stdout_open_does_not_hold_the_session(runner: Runner) -> None:
    runner.request("sh", "-c", "sleep 600 & echo done")
    _, receipt = runner.run()
    assert receipt.exit_code == 0
    assert receipt.ended_at - (receipt.started_at or 0) < 30
    assert [event["data"]["text"] for event in runner.events("log")] == ["done"]


def test_stop_ends_a_running_agent_and_returns_its_receipt(runner: Runner) -> None:
    runner.request(sys.executable, CHILD, "ignore-term")
    runner.start("run", "--hold", "--json")
    eventually(runner.ready)
    _, answer = runner.verb("stop")
    assert answer["data"]["receipt"]["stopped"] is True
    assert outcome_of(runner.receipt()) is Outcome.CANCELLED
    again = runner.verb("stop")[1]
    assert again["data"]["receipt"] == answer["data"]["receipt"]


def test_stop_that_comes_first_wins_the_claim(runner: Runner) -> None:
    runner.request("true")
    assert runner.verb("stop")[1]["data"]["state"] == "stopped"
    status, answer = runner.verb("run")
    assert (status, answer["failure"]["code"]) == (69, "session-stopped")


def test_same_request_attaches_and_another_is_refused(runner: Runner) -> None:
    """One activation: its side effect happens once however often it is started."""
    request = runner.request("sh", "-c", "echo once >> count; sleep 0.3", workdir=str(runner.folder.parent))
    starts = [runner.start("run", "--wait", "--json") for _ in range(5)]
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in starts]
    assert sorted(answer["data"]["attached"] for answer in answers) == [False, True, True, True, True]
    assert (runner.folder.parent / "count").read_text() == "once\n"
    (runner.folder / "request.json").write_text(to_json(replace(request, prompt="another")))
    status, answer = runner.verb("run")
    assert (status, answer["failure"]["code"]) == (75, "session-conflict")


@pytest.mark.parametrize("hold", [True, False])
def test_killed_supervisor_is_finished_by_whoever_comes_next(runner: Runner, *, hold: bool) -> None:
    """With its parent there at once; without, when `stop` asks. The receipt says so, and nothing is left.

    Where nobody adopted the orphans, whatever else starts on this machine meanwhile keeps the receipt from confirming.
    """
    runner.request(sys.executable, CHILD, "ignore-term")
    holder = runner.start("run", "--hold" if hold else "--detach", "--json")
    eventually(runner.ready)
    if not hold:
        holder.communicate(timeout=30)
        parent = int(Path("/proc", str(runner.supervisor()), "stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
    os.kill(runner.supervisor(), signal.SIGKILL)
    if hold:
        holder.communicate(timeout=30)
    receipt = runner.verb("stop")[1]["data"]["receipt"]
    assert receipt["supervisor_lost"] is True
    assert receipt["survivors"] == []
    assert receipt["cleanup_confirmed"] is (receipt["unaccounted"] == [])
    assert hold is False or receipt["unaccounted"] == []
    assert outcome_of(runner.receipt()) is Outcome.SANDBOX_LOST
    assert pids_below(f"BOXSTRAP_SESSION={runner.folder.name}") == []


def test_agent_that_kills_its_supervisor_is_reaped(runner: Runner) -> None:
    runner.request(sys.executable, CHILD, "kill-supervisor")
    _, receipt = runner.run()
    assert receipt.supervisor_lost
    assert receipt.cleanup_confirmed
    assert pids_below(f"BOXSTRAP_SESSION={runner.folder.name}") == []


def test_evidence_is_numbered_without_gaps_and_matches_the_receipt(runner: Runner) -> None:
    runner.request("sh", "-c", r"printf 'a\303\n\000b\n'; seq 1 200; printf 'no end'")
    _, receipt = runner.run()
    raw = (runner.folder / "evidence.ndjson").read_bytes()
    assert [event["seq"] for event in runner.events()] == list(range(1, len(runner.events()) + 1))
    assert (len(raw), runner.events("ended")[0]["data"]["reason"]) == (receipt.evidence_bytes, "exited")
    texts = [event["data"]["text"] for event in runner.events("log")]
    assert texts[:2] == ["a\N{REPLACEMENT CHARACTER}", "\0b"]
    assert texts[2:] == [*map(str, range(1, 201)), "no end"]
    assert (runner.folder / "agent.out").read_bytes().startswith(b"a\xc3\n\0b\n1\n")


def test_long_line_spills_its_payload_into_artifacts(runner: Runner) -> None:
    runner.request("sh", "-c", "head -c 1000000 /dev/zero | tr '\\0' x; echo; echo after")
    runner.run()
    spilled, after = runner.events("log")
    assert after["data"]["text"] == "after"
    body = json.loads((runner.folder / "artifacts" / spilled["data"]["artifact"]).read_text())
    assert body["text"] == "x" * 1000000


def test_tail_by_offset_returns_every_byte_once(runner: Runner) -> None:
    runner.request("sh", "-c", "for i in 1 2 3 4 5; do echo $i; sleep 0.05; done")
    runner.start("run", "--hold", "--json")
    collected, offset, state = b"", 0, ""
    while state != "ended":
        _, tail = runner.verb("tail", "--from", str(offset), "--wait", "5")
        collected += base64.b64decode(tail["chunk"])
        offset, state = tail["next"], tail["state"]
    assert collected == (runner.folder / "evidence.ndjson").read_bytes()


def test_agent_environment_is_the_tasks_but_for_the_documented_variables(runner: Runner, tmp_path: Path) -> None:
    """HOME and XDG move; LD_* and PYTHON* come back as the task set them; nothing of ours but the marker is seen."""
    home = tmp_path / "home"
    (home / ".cargo").mkdir(parents=True)
    task = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PYTHONPATH": "/x",
        "LANG": "C",
        "BOXSTRAP_TASK_LD_LIBRARY_PATH": "/nowhere",
    }
    runner.request("sh", "-c", "env -0 > seen", workdir=str(tmp_path), env={"ADDED": "1"})
    runner.verb("run", env=task)
    seen = dict(entry.split("=", 1) for entry in (tmp_path / "seen").read_text().split("\0") if entry)
    assert seen["LD_LIBRARY_PATH"] == "/nowhere"
    assert seen["PYTHONPATH"] == "/x"
    assert (seen["LANG"], seen["ADDED"], seen["CARGO_HOME"]) == ("C", "1", str(home / ".cargo"))
    assert seen["HOME"] == str(runner.folder / "home")
    changed = {name for name in seen if task.get(name) != seen[name]} - {
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
        "LD_LIBRARY_PATH",
        "ADDED",
    }
    assert changed == {
        "HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "CARGO_HOME",
        "GIT_CONFIG_COUNT", "GIT_CONFIG_KEY_0", "GIT_CONFIG_VALUE_0", "BOXSTRAP_SESSION", "BOXSTRAP_PROMPT_FILE",
    }  # fmt: skip


def test_program_that_is_not_there_is_a_setup_failure(runner: Runner) -> None:
    runner.request("/no/such/program")
    _, receipt = runner.run()
    assert outcome_of(receipt) is Outcome.SETUP_FAILED
    assert "/no/such/program" in receipt.detail


@pytest.mark.parametrize(
    ("text", "code"),
    [("", "bad-request"), ('{"v":2}', "bad-request"), ("[]", "bad-request"), ('{"v":1,"nonsense":1}', "bad-request")],
)
def test_broken_request_is_refused_with_a_code(runner: Runner, text: str, code: str) -> None:
    runner.folder.mkdir(parents=True)
    (runner.folder / "request.json").write_text(text)
    status, answer = runner.verb("run")
    assert (status, answer["failure"]["code"]) == (69, code)


def test_missing_workdir_is_refused_before_the_claim(runner: Runner) -> None:
    runner.request("true", workdir="/no/such/folder")
    status, answer = runner.verb("run")
    assert (status, answer["failure"]["code"]) == (69, "workdir-missing")
    assert not (runner.folder / "launch.claim").is_symlink()


def test_one_follower_sees_a_whole_session_and_ends_with_it(runner: Runner) -> None:
    """Each answer takes up where the one before ended; the last has the receipt; it also ends when the session is removed."""
    runner.request("sh", "-c", "for i in 1 2 3 4 5; do echo $i; sleep 0.05; done")
    follower = runner.start("tail", "--follow", "60", "--json")
    runner.start("run", "--hold", "--json")
    out, _ = follower.communicate(timeout=60)
    tails = [json.loads(line) for line in out.splitlines()]
    assert all(after["start"] == before["next"] for before, after in pairwise(tails))
    assert b"".join(base64.b64decode(tail["chunk"]) for tail in tails) == (runner.folder / "evidence.ndjson").read_bytes()
    assert tails[-1]["receipt"]["cleanup_confirmed"] is True
