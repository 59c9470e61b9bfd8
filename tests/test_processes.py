# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""No process of the agent is left, however it tries: real children, and scans of /proc that share no code with the reaper."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from polling import eventually
from test_supervisor import CHILD, SOURCES, Runner, pids_below

from boxstrap.runner import cgroups, processes
from boxstrap.runner.layout import SessionPaths
from boxstrap.runner.receipts import state_of
from boxstrap.runner.wire import Outcome, Receipt, outcome_of, session_brand, to_json

RUN_MANY = str(Path(__file__).parent / "children" / "run_many.py")
HARMLESS = {"SIGCHLD", "SIGCONT", "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGURG", "SIGWINCH"}
FATAL = [number for number in signal.valid_signals() if getattr(number, "name", "") not in HARMLESS]


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path / "sessions" / f"p{os.getpid()}-{tmp_path.name}"[:100])
    yield runner
    runner.end()
    for pid in pids_below(runner.folder.name):
        os.kill(pid, signal.SIGKILL)


def stat_of(runner: Runner) -> processes.Process | None:
    """Read the supervisor's entry, once there is one."""
    return processes.read(runner.supervisor()) if (runner.folder / "supervisor.json").exists() else None


def run_all(folder: Path, scripts: dict[str, str]) -> dict[str, Runner]:
    """Run each script as the agent of a session of its own, in four lanes."""
    runners = {name: Runner(folder / name) for name in scripts}
    for name, script in scripts.items():
        runners[name].request("sh", "-c", script)
    paths = [str(runner.folder) for runner in runners.values()]
    lanes = [subprocess.Popen([sys.executable, "-I", RUN_MANY, str(SOURCES), *paths[lane::4]]) for lane in range(4)]
    assert [lane.wait(timeout=120) for lane in lanes] == [0] * 4
    return runners


def test_every_exit_code_is_told_as_it_was(tmp_path: Path) -> None:
    runners = run_all(tmp_path, {f"c{code}": f"exit {code}" for code in range(256)})
    told = {name: (runner.receipt().exit_code, runner.receipt().signal) for name, runner in runners.items()}
    assert told == {f"c{code}": (code, None) for code in range(256)}
    completed = [name for name, runner in runners.items() if outcome_of(runner.receipt()) is Outcome.COMPLETED]
    assert completed == ["c0"]


def test_every_fatal_signal_is_told_apart_from_every_exit_code(tmp_path: Path) -> None:
    """The standard ones and the real-time ones; the agent is deaf to none of them because of us."""
    runners = run_all(tmp_path, {f"s{int(number)}": f"kill -{int(number)} $$; exit 1" for number in FATAL})
    told = {name: (runner.receipt().exit_code, runner.receipt().signal) for name, runner in runners.items()}
    assert told == {f"s{int(number)}": (None, int(number)) for number in FATAL}
    assert len(told) > 50
    assert "SIGSEGV" in runners["s11"].receipt().detail


@pytest.mark.parametrize("scenario", ["headless", "traced", "stopped"])
def test_process_in_a_strange_state_is_reaped(runner: Runner, scenario: str) -> None:
    """One without its first thread (a zombie by its looks), one that is traced, one that is stopped."""
    runner.request(sys.executable, CHILD, scenario, runner.folder.name, deadline_s=1.0)
    _, receipt = runner.run()
    if scenario == "traced":
        assert "traced=00" in (runner.folder / "agent.out").read_text()
    assert (receipt.timed_out, receipt.cleanup_confirmed, receipt.survivors) == (True, True, [])
    assert pids_below(runner.folder.name) == []


def test_daemon_that_lost_its_environment_and_both_its_keepers_is_found_by_its_brand(runner: Runner) -> None:
    """Double fork, setsid, no descriptors, empty environment; then supervisor and watchdog are killed. PID 1 has it now."""
    token = f"token-{runner.folder.name}"
    runner.request(sys.executable, CHILD, "daemons-then-kill-above", token)
    runner.start("run", "--hold", "--json").communicate(timeout=30)
    assert eventually(lambda: len(pids_below(token)) >= 2)
    receipt = runner.verb("stop")[1]["data"]["receipt"]
    assert (receipt["supervisor_lost"], receipt["survivors"]) == (True, [])
    assert pids_below(token) == []


def test_daemon_that_shed_the_brand_too_is_named_and_nothing_is_confirmed(runner: Runner) -> None:
    """Nobody can tell whose it is: it is left alone, and the receipt does not say that all is well."""
    token = f"token-{runner.folder.name}"
    runner.request(sys.executable, CHILD, "shed-then-kill-above", token)
    runner.start("run", "--hold", "--json").communicate(timeout=30)
    left = eventually(lambda: pids_below(f"sleep(600)\0{token}"))
    receipt = runner.verb("stop")[1]["data"]["receipt"]
    assert (receipt["supervisor_lost"], receipt["cleanup_confirmed"], receipt["survivors"]) == (True, False, [])
    assert set(left) <= {one["pid"] for one in receipt["unaccounted"]}
    assert set(left) <= set(pids_below(token))


def test_supervisor_whose_watchdog_was_killed_ends_in_order(runner: Runner) -> None:
    runner.request("sh", "-c", "read -r x </proc/$PPID/stat; set -- ${x##*)}; kill -9 $2; echo on; exit 3")
    runner.start("run", "--hold", "--json").communicate(timeout=30)
    eventually((runner.folder / "receipt.json").exists)
    receipt = runner.receipt()
    assert (receipt.exit_code, receipt.supervisor_lost, receipt.cleanup_confirmed) == (3, False, True)


def test_stopped_supervisor_and_watchdog_are_let_go_on_by_stop(runner: Runner) -> None:
    runner.request(sys.executable, CHILD, "stop-above", runner.folder.name)
    runner.start("run", "--hold", "--json")
    eventually(lambda: (found := stat_of(runner)) is not None and found.state == "T")
    receipt = runner.verb("stop")[1]["data"]["receipt"]
    assert (receipt["stopped"], receipt["supervisor_lost"], receipt["cleanup_confirmed"]) == (True, False, True)
    assert pids_below(runner.folder.name) == []


def test_stopped_supervisor_and_watchdog_are_let_go_on_by_whoever_looks(runner: Runner) -> None:
    runner.request(sys.executable, CHILD, "stop-above", runner.folder.name, deadline_s=1.0)
    runner.start("run", "--hold", "--json")
    eventually(lambda: (found := stat_of(runner)) is not None and found.state == "T")
    eventually(lambda: runner.verb("tail", "--wait", "1")[1]["state"] == "ended", within_s=20)
    assert (runner.receipt().timed_out, runner.receipt().supervisor_lost) == (True, False)


def test_stopped_supervisor_is_let_go_on_by_its_watchdog(runner: Runner) -> None:
    runner.request("sh", "-c", "kill -STOP $PPID; echo on")
    _, receipt = runner.run()
    assert (receipt.exit_code, receipt.supervisor_lost) == (0, False)


def test_receipt_that_the_agent_wrote_ends_nothing_while_it_runs(runner: Runner) -> None:
    runner.request("sh", "-c", f"echo '{{}}' > {runner.folder}/receipt.json; echo ready; exec sleep 600")
    runner.start("run", "--hold", "--json")
    eventually(runner.ready)
    assert runner.verb("tail", "--wait", "0")[1]["state"] == "running"
    assert runner.verb("stop")[1]["data"]["receipt"]["stopped"] is True


def test_receipt_that_the_agent_wrote_after_killing_its_supervisor_is_not_believed(runner: Runner) -> None:
    """A perfect forgery: an earlier session's own words under this session's name. The watchdog knows that nobody vouched."""
    runner.request("true")
    _, genuine = runner.run()
    forged = runner.folder.parent / "forged"
    forged.write_text(to_json(genuine))
    for name in ("launch.claim", "receipt.json", "evidence.ndjson", "supervisor.json"):
        (runner.folder / name).unlink()
    runner.request("sh", "-c", f"kill -9 $PPID; cp {forged} {runner.folder}/receipt.json; exec sleep 600")
    _, receipt = runner.run()
    assert (receipt.supervisor_lost, receipt.cleanup_confirmed) == (True, True)
    assert outcome_of(receipt) is Outcome.SANDBOX_LOST


def test_receipt_that_confirms_while_something_runs_is_corrected_by_stop(runner: Runner) -> None:
    token = f"token-{runner.folder.name}"
    runner.request(sys.executable, CHILD, "daemons-then-kill-above", token)
    runner.start("run", "--hold", "--json").communicate(timeout=30)
    eventually(lambda: state_of(SessionPaths(str(runner.folder))) == "lost")
    lie = {**LIE, "session_id": runner.folder.name, "request_digest": str((runner.folder / "launch.claim").readlink())}
    (runner.folder / "receipt.json").write_text(json.dumps(lie))
    assert runner.verb("tail")[1]["state"] == "lost"
    receipt = runner.verb("stop")[1]["data"]["receipt"]
    assert receipt["supervisor_lost"] is True
    assert pids_below(token) == []


LIE = asdict(
    Receipt(
        session_id="",
        request_digest="",
        agent="command",
        started_at=1.0,
        ended_at=2.0,
        exit_code=0,
        signal=None,
        status="",
        detail="",
        timed_out=False,
        stopped=False,
        oom_killed=False,
        supervisor_lost=False,
        cleanup_confirmed=True,
        survivors=[],
        reaped=1,
        evidence_bytes=0,
        evidence_sha256="",
        stdout_bytes=0,
        stderr_bytes=0,
        output_truncated=False,
        peak_rss_bytes=0,
        cpu_seconds=0.0,
    )
)


@pytest.mark.parametrize(
    ("what", "name"),
    [
        *(("fifo", name) for name in ("receipt.json", "supervisor.json", "request.json", "lock", "evidence.ndjson", "stop")),
        *(("link", name) for name in ("receipt.json", "lock", "evidence.ndjson")),
        *(("folder", name) for name in ("receipt.json", "evidence.ndjson")),
        *(("deep", name) for name in ("receipt.json", "request.json")),
        *(("huge", name) for name in ("receipt.json", "supervisor.json")),
    ],
)
def test_thing_planted_in_the_session_folder_neither_hangs_nor_misleads(runner: Runner, what: str, name: str) -> None:
    """A FIFO that would wait, a link to elsewhere, a folder, JSON too deep, a file too large: `stop` still ends it."""
    target = runner.folder / name
    plant = f"mkdir planted; {PLANT[what]}; rm -rf {target}; mv planted/it {target}"
    runner.request("sh", "-c", f"sleep 600 & {plant}; echo ready; wait")
    runner.start("run", "--hold", "--json")
    eventually(runner.ready)
    runner.verb("tail", "--wait", "0")
    runner.verb("status")
    runner.verb("stop")
    assert pids_below(f"BOXSTRAP_SESSION={runner.folder.name}") == []
    assert runner.verb("stop", "--remove")[1] is not None
    assert not runner.folder.exists()
    assert Path("/etc/passwd").exists()


PLANT = {
    "fifo": "mkfifo planted/it",
    "link": "ln -s /etc/passwd planted/it",
    "folder": "mkdir planted/it",
    "deep": "head -c 900000 /dev/zero | tr '\\0' '[' > planted/it",
    "huge": "truncate -s 100G planted/it",
}


def test_folders_nested_without_measure_are_removed(runner: Runner) -> None:
    """Five thousand levels: too deep for a recursive walk, and for a path."""
    code = "import os; os.chdir(os.environ['HOME'])\nfor _ in range(5000): os.mkdir('d'); os.chdir('d')"
    runner.request(sys.executable, "-I", "-c", code)
    runner.run()
    runner.verb("stop", "--remove")
    assert not runner.folder.exists()


def test_brand_survives_what_sheds_the_marker_and_is_no_bother(runner: Runner) -> None:
    """The agent's limits are the task's but for the brand, and it may raise that to what it was."""
    runner.request("sh", "-c", "cat /proc/self/limits > limits; env -i setsid cat /proc/self/limits > daemon")
    runner.run()
    ours = Path("/proc/self/limits").read_text()
    for name in ("limits", "daemon"):
        seen = (runner.folder.parent / name).read_text()
        assert str(session_brand(str(runner.folder))) in seen
        differing = [line for line in zip(seen.splitlines(), ours.splitlines(), strict=True) if line[0] != line[1]]
        assert [line[0].split("  ")[0] for line in differing] == ["Max realtime timeout"]


def test_same_id_in_another_root_is_another_session(runner: Runner, tmp_path: Path) -> None:
    """Stopping one of two sessions of one name leaves the other alone."""
    other = Runner(tmp_path / "others" / runner.folder.name)
    for one in (runner, other):
        one.request("sh", "-c", "echo ready; exec sleep 600")
        one.start("run", "--hold", "--json")
        eventually(one.ready)
    runner.verb("stop")
    assert other.verb("status")[1]["data"]["state"] == "running"
    assert other.verb("stop")[1]["data"]["receipt"]["stopped"] is True
    for process in other.started:
        process.communicate(timeout=30)


def test_status_finishes_for_a_supervisor_that_was_killed(runner: Runner) -> None:
    runner.request(sys.executable, CHILD, "daemons-then-kill-above", runner.folder.name)
    runner.start("run", "--hold", "--json").communicate(timeout=30)
    eventually(lambda: state_of(SessionPaths(str(runner.folder))) == "lost")
    assert runner.verb("status")[1]["data"]["receipt"]["supervisor_lost"] is True
    assert pids_below(runner.folder.name) == []


def test_peak_memory_and_cpu_seconds_are_measured(runner: Runner) -> None:
    code = "import time; x = bytearray(80 << 20)\nwhile time.process_time() < 0.3: pass"
    runner.request(sys.executable, "-I", "-c", code)
    _, receipt = runner.run()
    assert 80 << 20 < receipt.peak_rss_bytes < 400 << 20
    assert 0.3 <= receipt.cpu_seconds < 30


V2 = "low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 0\n"
V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"


@pytest.mark.parametrize(
    ("own", "files", "kills"),
    [
        ("0::/\n", {"memory.events": V2}, 2),
        ("0::/user.slice/a:b\n", {"user.slice/a:b/memory.events": V2, "memory.events": "oom_kill 9\n"}, 2),
        ("0::/not/seen/here\n", {"memory.events": V2}, 2),
        ("12:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n0::/\n", {"memory/memory.oom_control": V1}, 5),
        ("12:memory:/here\n0::/\n", {"memory/here/memory.oom_control": V1, "memory/memory.oom_control": "oom_kill 7\n"}, 5),
        ("12:memory:/\n", {"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"}, 0),
        ("0::/\n", {"memory.events": "nonsense\noom_kill\n"}, 0),
        ("", {}, 0),
    ],
    ids=["v2", "v2-nested", "v2-own-namespace", "v1", "v1-nested", "v1-before-4.13", "broken", "none"],
)
def test_out_of_memory_kills_are_counted_in_both_versions(tmp_path: Path, own: str, files: dict[str, str], kills: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text(own)
    assert cgroups.oom_kills(root=str(tmp_path), own=str(tmp_path / "own")) == kills


def test_process_that_another_exec_started_is_accounted_for() -> None:
    """The baseline's arithmetic, on a made-up table: what hangs from a new root is somebody's, what hangs from PID 1 is not."""
    first = processes.Process(1, 0, 10, "S", "init")
    table = [
        first,
        processes.Process(50, 0, 900, "S", "exec"),  # started from outside
        processes.Process(51, 50, 910, "S", "its child"),
        processes.Process(4_000_060, 1, 920, "S", "stray"),
        processes.Process(4_000_061, 4_000_060, 930, "S", "below it"),
        processes.Process(4_000_062, 1, 940, "Z", "gone"),
    ]
    assert [one.name for one in processes.unaccounted({first.key}, table)] == ["stray", "below it"]
    assert processes.unaccounted({(1, 9)}, table) == []  # the box was restarted
    assert replace(table[5], threads=2).dead is False
