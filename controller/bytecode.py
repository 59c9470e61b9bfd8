# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Unchecked-hash .pyc files for a tree: they survive lost mtimes, and the first import in a sandbox does not pay for compiling.

The compiler is a Python of the same minor version, of any architecture. The work is cut into a fixed number of shards, each
compiled by one process in sorted order with hash randomisation off, because marshal's output depends on what the process
compiled before: two builds must be byte-identical on any number of cores.
"""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from boxstrap.controller.errors import ArtifactError

SHARDS = 4
TIMEOUT_S = 600.0

_COMPILE = """
import os, py_compile, sys
root = sys.argv[1]
mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
for name in sys.stdin.read().split("\\0"):
    try:
        path = os.path.join(root, name)
        folder, _, file = path.rpartition("/")
        cache = f"{folder}/__pycache__/{file[:-3]}.{sys.implementation.cache_tag}.pyc"
        py_compile.compile(path, cache, name, doraise=True, invalidation_mode=mode, quiet=2)
    except (py_compile.PyCompileError, ValueError) as error:
        print(name, file=sys.stderr)
"""


_ALONE = ("-S", "-s", "-P", "-B", "-W", "ignore", "-X", "pycache_prefix=/nonexistent")
"""No site, and no bytecode for the compiler's own imports: whether they came from a .pyc shows in what marshal writes."""


def compile_tree(tree: Path, python: Path) -> list[str]:
    """Compile every .py file below `tree`.

    Returns:
        Names of the files that are not valid Python for this version (templates, test data): they stay as source.

    Raises:
        ArtifactError: the compiler itself failed.
    """
    names = sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*.py"))
    shards = [shard for shard in (names[index::SHARDS] for index in range(SHARDS)) if shard]
    with ThreadPoolExecutor(max_workers=min(SHARDS, os.cpu_count() or 1)) as pool:
        done = list(pool.map(lambda shard: _compile(tree, python, shard), shards))
    return sorted(name for refused in done for name in refused)


def _compile(tree: Path, python: Path, names: list[str]) -> list[str]:
    done = subprocess.run(
        [str(python), *_ALONE, "-c", _COMPILE, str(tree)],
        input="\0".join(names),
        env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PATH": os.defpath},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise ArtifactError(
            f"{python} could not compile a tree: {done.stderr.strip()[-300:]}", remedy="Look at that interpreter."
        )
    return done.stderr.splitlines()
