# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The README, followed to the letter. It refuses to help: what is missing there, fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from sample_repo import PROMPT, make_sample_repo
from scripted_model import ScriptedModel

from boxstrap.controller.collect import read_events

HOUSE = Path(__file__).parent.parent
BLOCK = re.compile(r"`(?P<path>[\w-]+/[\w./-]+\.\w+)`(?:(?!\n\n).)*?:\n\n```\w*\n(?P<text>.*?)```", re.DOTALL)
COMMANDS = re.compile(r"```sh\n(.*?)```", re.DOTALL)


def checkout(target: Path) -> None:
    """Copy what belongs to this checkout, links as links, with the environment beside it."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=HOUSE, capture_output=True, check=True
    )
    for name in filter(None, names.stdout.decode().split("\0")):
        if os.path.lexists(HOUSE / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(HOUSE / name, target / name, follow_symlinks=False)
    (target / ".venv").symlink_to(HOUSE / ".venv")


def test_agent_is_added_as_the_readme_says(tmp_path: Path) -> None:
    """A module and a lock, as they are printed there, are all that it takes: the new agent repairs a repository."""
    house = tmp_path / "house"
    checkout(house)
    text = (HOUSE / "README.md").read_text(encoding="utf-8")
    section = text.split("### Add an agent in ten minutes")[1].split("\n## ")[0]
    files = {found["path"]: found["text"] for found in BLOCK.finditer(section)}
    assert sorted(files) == ["requirements/oneshot.in", "runner/agents/oneshot.py"]
    for name, content in files.items():
        (house / name).write_text(content, encoding="utf-8")
    make_sample_repo(house / "my-repo")
    (house / "task.txt").write_text(PROMPT, encoding="utf-8")
    commands = COMMANDS.findall(section)
    assert len(commands) == 1
    with ScriptedModel("write-script", strict=True) as model:
        # The environment is that of the other checkout: its boxstrap is found there unless PYTHONPATH comes first.
        env = {**os.environ, "MODEL_URL": model.url, "PYTHONPATH": str(house / "src")}
        script = commands[0].replace("/tmp/a-box", str(tmp_path / "a-box"))
        done = subprocess.run(
            ["bash", "-euc", script], cwd=house, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(model.calls) == 1
    events = list(read_events(house / "out" / "oneshot" / "evidence.ndjson"))
    kinds = [event.kind for event in events]
    assert kinds.index("model_call") < kinds.index("tool_call") < kinds.index("tool_result")
    assert next(event for event in events if event.kind == "tool_result").data["status"] == "completed"
    look = subprocess.run(["git", "status", "--porcelain"], cwd=house / "my-repo", capture_output=True, text=True, check=True)
    assert look.stdout == " M bills/split.py\n"


def test_new_agent_passes_the_projects_own_checks(tmp_path: Path) -> None:
    """What the README tells people to write is written as this project writes."""
    section = (HOUSE / "README.md").read_text(encoding="utf-8").split("### Add an agent in ten minutes")[1]
    module = tmp_path / "runner" / "agents" / "oneshot.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        next(found["text"] for found in BLOCK.finditer(section) if found["path"].endswith(".py")), encoding="utf-8"
    )
    shutil.copy(HOUSE / "pyproject.toml", tmp_path)
    for check in (["check"], ["format", "--check"]):
        ruff = [str(HOUSE / ".venv" / "bin" / "ruff"), *check, "runner/agents/oneshot.py"]
        done = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
