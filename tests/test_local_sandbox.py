# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What only the local adapter promises: its folder's bounds, and no zombie of what it spawned."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from polling import eventually

from boxstrap.controller.errors import UsageError
from boxstrap.controller.sandboxes.local import LocalSandbox


async def test_local_environment_is_built_from_nothing(tmp_path: Path) -> None:
    """PATH, HOME inside the folder, LANG, and what the shell adds; no more."""
    result = await LocalSandbox(tmp_path).exec("env | cut -d= -f1 | sort")
    assert set(result.stdout.split()) <= {"PATH", "HOME", "LANG", "PWD", "OLDPWD", "SHLVL", "_"}
    assert (await LocalSandbox(tmp_path).exec("cd && pwd")).stdout == f"{tmp_path}/home\n"


async def test_local_upload_stays_in_its_folder(tmp_path: Path) -> None:
    """A path outside, one that climbs out and one through a link are refused before anything is written."""
    (tmp_path / "outside").mkdir()
    sandbox = LocalSandbox(tmp_path / "box")
    (tmp_path / "box" / "link").symlink_to(tmp_path / "outside")
    for target in (tmp_path / "outside" / "a", f"{tmp_path}/box/../outside/a", tmp_path / "box" / "link" / "a"):
        with pytest.raises(UsageError, match="inside"):
            await sandbox.upload(__file__, str(target))
    assert not list((tmp_path / "outside").iterdir())


async def test_local_refuses_another_user(tmp_path: Path) -> None:
    """It has one user, and says so; naming that one is fine."""
    sandbox = LocalSandbox(tmp_path)
    with pytest.raises(UsageError, match="current user"):
        await sandbox.exec("true", user="somebody-else")
    assert (await sandbox.exec("true", user=os.getuid())).return_code == 0


async def test_local_spawn_is_reaped(tmp_path: Path) -> None:
    """What was spawned runs on by itself, and leaves no zombie when it ends."""
    sandbox = LocalSandbox(tmp_path)
    await sandbox.spawn("echo $$ >pid; exec sleep 0.2", cwd=str(tmp_path))
    pid = eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
    eventually(lambda: not Path("/proc", pid).exists())
    with pytest.raises(FileNotFoundError):
        await sandbox.spawn("true", cwd="/no/such/folder")


def test_local_roots_are_the_usual_ones_in_its_folder(tmp_path: Path) -> None:
    runtime, session = LocalSandbox(tmp_path).roots("nooa")
    assert (runtime, session) == (f"{tmp_path}/opt/nemo-gym-nooa", f"{tmp_path}/tmp/nemo-gym-nooa")
