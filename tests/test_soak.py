# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A short soak: some kills of every kind, nothing lost, nothing left. The long one is `./build.sh soak --kills 300`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SOAK = str(Path(__file__).parent / "soak.py")


@pytest.mark.container
def test_short_soak_loses_nothing_and_leaves_nothing(image: Callable[[str], str]) -> None:
    image("debian:12")
    done = subprocess.run(
        [sys.executable, SOAK, "--kills", "15", "--seed", "11"],
        env={**os.environ, "PYTHONPATH": os.path.dirname(SOAK)},  # noqa: PTH120
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    found = re.fullmatch(
        r"kills=15 sessions=\d+ written=(\d+) collected=(\d+) lost=0 duplicated=0 left=0 outside=0\n", done.stdout
    )
    assert found, done.stdout
    assert int(found[1]) == int(found[2]) > 100
