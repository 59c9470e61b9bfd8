# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the sessions in the folders argv[2:], one after the other, each in a fork: no interpreter is started for it."""

import contextlib
import os
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])

from boxstrap.runner.__main__ import main


def run(folder: str) -> None:
    """Run one session to its end in a child."""
    child = os.fork()
    if child == 0:
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            main(["run", "--session", folder, "--json"])
        os._exit(0)
    os.waitpid(child, 0)


for one in sys.argv[2:]:
    run(one)
