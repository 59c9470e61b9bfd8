# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The real models of nemo-gym and harbor, in an environment of their own, and a child in it that validates with them.

The environment is made once for a lock and a Python, in the user's cache: what the models import, not what the packages need
to run. Import the fixture into a test module to use it. It refuses to be part of the project: nothing here is imported by it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from boxstrap.controller.cache import default_root
from boxstrap.runner.layout import RuntimePaths

LOCKS = Path(__file__).parent / "locks"
CHILD = Path(__file__).parent / "children" / "validate_shapes.py"
_DATA_SETS = ("resources_servers", "benchmarks", "environments", "responses_api_agents", "responses_api_models")
"""Folders of the nemo-gym wheel that hold no models: 140 MB."""

Validate = Callable[[str, object], dict[str, Any]]
"""`validate(target, value)` is what the target's own model makes of the value; it fails the test when it refuses it."""


@pytest.fixture(scope="session")
def validate(runtime_tree: RuntimePaths) -> Iterator[Validate]:
    """Validates against the real models, in one child for all tests."""
    argv = [runtime_tree.python, "-I", str(CHILD), str(_site(runtime_tree.python))]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(target: str, value: object) -> dict[str, Any]:
        assert child.stdin
        assert child.stdout
        child.stdin.write(json.dumps({"target": target, "value": value}) + "\n")
        child.stdin.flush()
        answer: dict[str, Any] = json.loads(child.stdout.readline())
        if answer["error"]:
            pytest.fail(f"{target}: {answer['error']}", pytrace=False)
        return answer

    yield ask
    assert child.stdin
    child.stdin.close()
    child.wait()


def _site(python: str) -> Path:
    """Return the environment for this Python, made now if nobody made it before."""
    ask = [python, "-c", "import sys; print(*sys.version_info[:2], sep='.')"]
    minor = subprocess.run(ask, capture_output=True, text=True, check=True)
    locks = [(LOCKS / name).read_bytes() for name in ("shapes.txt", "shapes-models.txt")]
    key = hashlib.sha256(b"".join([minor.stdout.encode(), *locks])).hexdigest()[:16]
    root = default_root() / "test-shapes"
    if not (root / key).is_dir():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as folder:
            stage = Path(folder, "site")
            _install(python, stage, "shapes.txt")
            # The models work on any Python that the interpreter may be; the package wants the newest 3.13.
            _install(python, stage, "shapes-models.txt", "--no-deps", "--python-version", "3.13.14")
            for name in _DATA_SETS:
                shutil.rmtree(stage / name, ignore_errors=True)
            try:
                stage.rename(root / key)
            except OSError:  # another test run was faster
                assert (root / key).is_dir()
    return root / key


def _install(python: str, target: Path, lock: str, *more: str) -> None:
    uv = shutil.which("uv") or str(Path(sys.executable).parent / "uv")
    argv = [uv, "pip", "install", "--quiet", "--no-config", "--require-hashes", "--python", python, "--target", str(target)]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [*argv, *more, "--requirement", str(LOCKS / lock)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
