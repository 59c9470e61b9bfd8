# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A small git repository with history, a real bug and a failing test, for the demo and the tests.

It is the same to the byte each time (fixed authors, dates and git settings), so its commit ids are known. It needs git here,
and git and python3 (standard library only) wherever an agent works on it. It refuses to read anyone's git configuration.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

PROMPT = "Splitting a bill loses cents: split(1000, 3) adds up to 999. Find the bug, fix it and make the tests pass."
HEAD = "9b396c0d5d8cc0fdc60727d584b2e1071ac31847"
"""The id of the last commit."""

_README = "# bills\n\nSplits a bill among people. Amounts are whole cents.\n\n    python3 -m unittest\n"
_INIT = '"""Split bills."""\n'
_SPLIT_BY_LOOP = '''"""Split an amount of cents among people."""


class Bill:
    """An amount in cents."""

    def __init__(self, total):
        self.total = total

    def split(self, people):
        """Return each one's share; the shares add up to the total."""
        if people < 1:
            raise ValueError("a bill needs at least one person")
        total = self.total
        shares = [0] * people
        for cent in range(total):
            shares[cent % people] += 1
        return shares
'''
_SPLIT_BY_DIVISION = '''"""Split an amount of cents among people."""


class Bill:
    """An amount in cents."""

    def __init__(self, total):
        self.total = total

    def split(self, people):
        """Return each one's share; the shares add up to the total."""
        if people < 1:
            raise ValueError("a bill needs at least one person")
        total = self.total
        return [total // people] * people
'''
_TEST = """import unittest

from bills.split import Bill


class SplitTest(unittest.TestCase):
    def test_even(self):
        self.assertEqual(Bill(900).split(3), [300, 300, 300])

    def test_nobody(self):
        with self.assertRaises(ValueError):
            Bill(900).split(0)
"""
_TEST_REMAINDER = (
    _TEST
    + """
    def test_no_cent_is_lost(self):
        for total, people in ((1000, 3), (1, 2), (7, 5)):
            self.assertEqual(sum(Bill(total).split(people)), total)
"""
)

_COMMITS: list[tuple[str, str, dict[str, str]]] = [
    (
        "2024-03-01T09:00:00+00:00",
        "Split a bill",
        {
            "README.md": _README,
            ".gitignore": "__pycache__/\n",
            "bills/__init__.py": _INIT,
            "bills/split.py": _SPLIT_BY_LOOP,
            "tests/__init__.py": "",
            "tests/test_split.py": _TEST,
        },
    ),
    (
        "2024-03-04T10:30:00+00:00",
        "Split by division: the loop took seconds for large bills",
        {"bills/split.py": _SPLIT_BY_DIVISION},
    ),
    ("2024-03-05T08:15:00+00:00", "Test that no cent is lost", {"tests/test_split.py": _TEST_REMAINDER}),
]


def make_sample_repo(path: Path) -> str:
    """Make the repository at `path` (a folder that does not exist or is empty) and return its HEAD commit id."""
    path.mkdir(parents=True, exist_ok=True)
    _git(path, "init", "--quiet", "--initial-branch=main", "--template=")
    for date, message, files in _COMMITS:
        for name, text in files.items():
            file = path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            file.chmod(0o644)
        _git(path, "add", "--all")
        _git(path, "commit", "--quiet", "--no-gpg-sign", f"--message={message}", date=date)
    return _git(path, "rev-parse", "HEAD").strip()


def _git(path: Path, *args: str, date: str = "") -> str:
    who = {"NAME": "Ada Example", "EMAIL": "ada@example.org", "DATE": date}
    env = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in who.items() if value}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "PATH": os.environ["PATH"], "LC_ALL": "C"}
    done = subprocess.run(
        ["git", "-c", "core.hooksPath=/dev/null", *args], cwd=path, env=env, check=True, capture_output=True, text=True
    )
    return done.stdout
