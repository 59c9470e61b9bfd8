# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Debugging by hand: the archive's verbs in a container, as people read them, and the README's walk-through as it stands."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from box_fixtures import PUSHED, light, pushed, rows, start
from containers import Box
from polling import eventually

from boxstrap.controller.sandboxes.docker import DockerSandbox
from boxstrap.controller.session import SessionSpec, open_session
from boxstrap.runner.wire import Outcome, Request, to_json

__all__ = ["light", "pushed", "rows", "start"]

pytestmark = pytest.mark.container
README = Path(__file__).resolve().parent.parent / "README.md"
SESSIONS = "/tmp/nemo-gym-command"
FAILING = "env -0; echo; echo trying; echo 'cannot find module frobnicate' >&2; exit 3"


@pytest.fixture
async def kept(start: Callable[..., Box], tmp_path: Path) -> Box:
    """A box in which the session `my-session` failed, and was kept."""
    box = start("debian:12", push="light", env={"LD_PRELOAD": "/none.so", "TASK": "a  b"})
    spec = SessionSpec(
        session_id="my-session",
        agent="command",
        workdir="/srv",
        out=tmp_path / "out",
        keep=True,
        argv=["bash", "--norc", "-c", FAILING],
    )
    async with open_session(DockerSandbox(box.id), spec) as session:
        result = await session.invoke(spec.request("p"))
    assert result.outcome is Outcome.AGENT_FAILED
    return box


def by_hand(box: Box, verb: str, *words: str, session: str = "my-session") -> tuple[int, str, str]:
    """Runs a verb as a person in the container does."""
    argv = ["sh", f"{PUSHED}/boxstrap.pyz", verb, "--session", f"{SESSIONS}/{session}", *words]
    ran = box.exec(argv, env={"LD_PRELOAD": ""})
    return ran.code, ran.out.decode(), ran.err.decode()


def data(box: Box, verb: str, *words: str, session: str = "my-session") -> Any:
    """What a verb says with --json."""
    code, out, _ = by_hand(box, verb, *words, "--json", session=session)
    assert out.count("\n") == 1
    answer = json.loads(out)
    assert answer["ok"] is (code == 0)
    return answer["data"] or answer["failure"]


def test_walk_through_of_the_readme_says_why_the_session_failed(kept: Box) -> None:
    """Each line of the block is run as it stands, with this box's name; together they tell the whole story."""
    if not shutil.which("docker"):
        pytest.skip("there is no docker command here")
    section = README.read_text(encoding="utf-8").partition("### Why did my session fail?")[2]
    found = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert found is not None
    lines = [line.replace("box=my-task", f"box={kept.name}") for line in found.group(1).splitlines()]
    settings, commands = lines[:3], lines[3:]
    said = {}
    for line in commands:
        done = subprocess.run(
            ["sh", "-c", "\n".join([*settings, line])], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        said[line.partition('"$box" ')[2].split('"$session')[0].split("--session")[0].split("--agent")[0].strip()] = done.stdout
    assert re.search(r"^outcome +agent_failed$", said['sh "$pyz" status'], re.MULTILINE)
    assert re.search(r"^agent +command: exit code 3$", said['sh "$pyz" status'], re.MULTILINE)
    assert "cannot find module frobnicate" in said["tail -n 20"]
    assert '"text":"trying"' in said['sh "$pyz" tail']
    assert "TASK=a  b\n" in said['sh "$pyz" env']
    assert said['sh "$pyz" shell'] == "/srv\n"
    assert "workdir-missing" in said['sh "$pyz" check']
    assert "confirmed" in said['sh "$pyz" stop']
    assert "removed /opt/nemo-gym-command/" in said['sh "$pyz" clean']
    assert kept.check("ls -A /tmp /opt") == "/opt:\n\n/tmp:"


def test_env_and_shell_give_what_the_agent_saw(kept: Box) -> None:
    """Byte for byte: LD_PRELOAD and two spaces too; a person's shell only lacks the mark of what the session may kill."""
    raw = kept.exec(["cat", f"{SESSIONS}/my-session/agent.out"]).out.partition(b"\ntrying")[0]
    shells_own = {"SHLVL", "_", "PWD", "OLDPWD"}
    saw = {name: value for name, _, value in (entry.partition("=") for entry in raw.decode().split("\0") if entry)}
    env = data(kept, "env")["env"]
    assert {name: value for name, value in env.items() if name not in shells_own} == {
        name: value for name, value in saw.items() if name not in shells_own
    }
    assert env["LD_PRELOAD"] == "/none.so"
    shell = by_hand(kept, "shell", "--", "env", "-0")[1]
    lacks = {name: value for name, _, value in (entry.partition("=") for entry in shell.split("\0") if entry)}
    assert {**lacks, "BOXSTRAP_SESSION": "my-session"} == env
    assert "TASK=a  b\n" in by_hand(kept, "env")[1]


def test_every_verb_answers_people_and_programs(kept: Box) -> None:
    """--json is one object, the human form has no Python in it, and the exit status is the documented one."""
    status = data(kept, "status")
    assert (status["state"], status["outcome"], status["receipt"]["exit_code"]) == ("ended", "agent_failed", 3)
    code, out, _ = by_hand(kept, "status")
    assert code == 0
    assert not set("{}[]'") & set(out), out
    code, out, _ = by_hand(kept, "run", "--wait")
    assert (code, "agent_failed" in out) == (4, True), "it attaches to what has ended, and exits as the outcome"
    assert by_hand(kept, "tail", "--json")[1].startswith('{"v":1,"start":0,')
    code, out, err = by_hand(kept, "tail")
    assert [json.loads(line)["seq"] for line in out.splitlines()][:2] == [1, 2]
    assert "state ended" in err
    assert by_hand(kept, "status", session="none")[0] == 69
    assert data(kept, "status", session="none")["code"] == "session-missing"
    assert by_hand(kept, "frobnicate")[0] == by_hand(kept, "status", "--frobnicate")[0] == 64
    for verb in ("check", "install", "run", "status", "tail", "stop", "shell", "env", "clean"):
        code, out, _ = by_hand(kept, verb, "--help")
        assert (code, f"boxstrap.pyz {verb}" in out, "Exit status: 0 done" in out) == (0, True, True)


def test_clean_refuses_a_running_session_and_takes_a_lost_one(kept: Box) -> None:
    """One whose supervisor was killed has no receipt: what it left is reaped, and then it is removed like the others."""
    request = Request(session_id="lost", agent="command", workdir="/", prompt="p", argv=["sleep", "600"])
    kept.check(f"mkdir -p {SESSIONS}/lost {SESSIONS}/not-ours; printf '%s' '{to_json(request)}' >{SESSIONS}/lost/request.json")
    assert data(kept, "run", "--detach", session="lost")["state"] == "running"
    clean = ["sh", f"{PUSHED}/boxstrap.pyz", "clean", "--agent", "command", "--json"]
    refused = kept.exec(clean, env={"LD_PRELOAD": ""})
    assert (refused.code, json.loads(refused.out)["failure"]["code"]) == (75, "session-conflict")
    said = json.loads(kept.check(f"cat {SESSIONS}/lost/supervisor.json"))
    keepers = [said["pid"], *([said["watchdog"][0]] if said["watchdog"] else [])]
    kept.check(f"kill -9 {' '.join(map(str, reversed(keepers)))}")
    done = kept.exec(clean, env={"LD_PRELOAD": ""})
    assert done.code == 0, done.out
    removed = json.loads(done.out)["data"]["removed"]
    assert {f"{SESSIONS}/lost", f"{SESSIONS}/my-session"} <= set(removed)
    assert kept.check(f"ls -A {SESSIONS}; ls -A /opt") == "not-ours"
    eventually(lambda: kept.check("grep -lz '^BOXSTRAP_SESSION=' /proc/[0-9]*/environ 2>/dev/null | wc -l") == "0")
