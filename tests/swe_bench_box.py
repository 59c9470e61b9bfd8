# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A task box built like SWE-bench's, by hand.

A repository at /testbed that another user owns, with a history and a failing test, and a conda-like installation (conda itself
is not in it) whose env `testbed` alone can run the tests. Its scripts do what conda's do: they read unset variables, let
commands fail, and talk.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from containers import Box
from sample_repo import make_sample_repo

OWNER_UID = 4711
ROOT = "/opt/miniconda3"

_CONDA_SH = f"""\
echo "conda-like: loaded"
false
export CONDA_EXE="{ROOT}/bin/conda"
conda() {{
    [ "$1" = activate ] || return 1
    false
    test -n "$CONDA_SHLVL_THAT_NOBODY_SET"
    export CONDA_PREFIX="{ROOT}/envs/$2" CONDA_DEFAULT_ENV="$2" CONDA_SHLVL=1
    export PATH="$CONDA_PREFIX/bin:$PATH"
    for script in "$CONDA_PREFIX"/etc/conda/activate.d/*.sh; do . "$script"; done
}}
"""
_ACTIVATE = f'. {ROOT}/etc/profile.d/conda.sh\nconda activate "${{1:-base}}"\n'
_ENV_SCRIPT = 'echo "conda-like: activating"\nexport LEDGER_CURRENCY=${LEDGER_CURRENCY_OF_NOBODY}EUR\n'
_LEDGER = '"""What only the env has."""\n\nimport os\n\nCURRENCY = os.environ["LEDGER_CURRENCY"]\n'


def make_conda_like(folder: Path, *, python: str) -> None:
    """Make the installation; `python` is the box's own version, "3.11"."""
    env = folder / "envs" / "testbed"
    files = {
        folder / "etc" / "profile.d" / "conda.sh": _CONDA_SH,
        folder / "bin" / "activate": _ACTIVATE,
        env / "etc" / "conda" / "activate.d" / "ledger.sh": _ENV_SCRIPT,
        env / "pyvenv.cfg": "home = /usr/bin\ninclude-system-site-packages = false\n",
        env / "lib" / f"python{python}" / "site-packages" / "ledger.py": _LEDGER,
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (env / "bin").mkdir()
    for name in ("python", "python3"):
        (env / "bin" / name).symlink_to("/usr/bin/python3")


def make_testbed(folder: Path) -> None:
    """Make the repository: the sample's, whose tests need the env."""
    make_sample_repo(folder)
    test = folder / "tests" / "test_split.py"
    test.write_text("import ledger\n\nassert ledger.CURRENCY == 'EUR'\n" + test.read_text(encoding="utf-8"), encoding="utf-8")
    who = ["-c", "user.name=Ada Example", "-c", "user.email=ada@example.org"]
    subprocess.run(["git", *who, "commit", "--quiet", "--no-gpg-sign", "-am", "Count in euros"], cwd=folder, check=True)


def furnish(box: Box, folder: Path) -> None:
    """Put both into a box of kind `task`, whose root user is not the repository's owner."""
    make_testbed(folder / "testbed")
    python = box.check("python3 -c 'import sys; print(*sys.version_info[:2], sep=\".\")'")
    make_conda_like(folder / "miniconda3", python=python)
    box.put(folder / "testbed", "/testbed", uid=OWNER_UID, gid=OWNER_UID)
    box.put(folder / "miniconda3", ROOT)


def patch_of(box: Box) -> str:
    """Extract the patch as the owner of the box does after the session was closed."""
    return box.check("git -c safe.directory=/testbed -C /testbed diff")


def start_over(box: Box) -> None:
    """Undo the patch."""
    box.check("git -c safe.directory=/testbed -C /testbed checkout -q -- .")
