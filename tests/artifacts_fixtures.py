# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What the artifacts of this checkout look like once unpacked: a runtime tree that no installer has touched.

Import the fixture into a test module to use it. It refuses to stand in for anything: interpreter and payload are the real ones,
from the user's cache or built now.
"""

from __future__ import annotations

import importlib
import platform
from pathlib import Path

import pytest

import boxstrap
from boxstrap.controller import archives, artifacts, tarball
from boxstrap.runner.layout import RuntimePaths


@pytest.fixture(scope="session")
def runtime_tree(tmp_path_factory: pytest.TempPathFactory) -> RuntimePaths:
    """Interpreter, lean NOOA payload and our own code, laid out as a published runtime."""
    interpreter = artifacts.interpreter(arch=platform.machine())
    payload = artifacts.payload("nooa", interpreter=interpreter)
    assert payload is not None
    tree = RuntimePaths(str(tmp_path_factory.mktemp("runtime")), "0" * 64)
    for archive, folder in ((interpreter.path, Path(tree.path, "python")), (payload.path, Path(tree.site))):
        folder.mkdir(parents=True)
        tarball.unpack(archive, folder)
    Path(tree.app).mkdir()
    Path(tree.app, "boxstrap").symlink_to(Path(str(boxstrap.__file__)).parent)
    for package in archives.VENDORED:
        Path(tree.app, package).symlink_to(Path(str(importlib.import_module(package).__file__)).parent)
    return tree
