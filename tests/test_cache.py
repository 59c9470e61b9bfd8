# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The cache of artifacts: built once, found again, and never believed without hashing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from polling import eventually

from boxstrap.controller import cache, tarball
from boxstrap.controller.cache import Cache, key_of
from boxstrap.controller.errors import ArtifactError

KEY = key_of({"a": 1})

BUILDER = """
import os, sys, time
from pathlib import Path
from boxstrap.controller.cache import Cache
root, log, release = map(Path, sys.argv[1:4])
def build(target):
    with log.open("a") as out:
        out.write(f"{os.getpid()}\\n")
    while not release.exists():
        time.sleep(0.01)
    target.write_text("built")
    return {}
print(Cache(root).get("things", sys.argv[4], "thing", build).sha256)
"""


def builder(root: Path, log: Path, release: Path) -> subprocess.Popen[str]:
    """Start a process that builds one entry: it logs its pid, and finishes once `release` exists."""
    command = [sys.executable, "-c", BUILDER, str(root), str(log), str(release), KEY]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def write(text: str, calls: list[str]) -> cache.Callable[[Path], dict[str, str]]:
    """Make a build that writes `text` and notes that it was called."""

    def build(target: Path) -> dict[str, str]:
        calls.append(text)
        target.write_text(text)
        return {"fact": "yes"}

    return build


def test_cache_builds_once_and_finds_again(tmp_path: Path) -> None:
    """The second get builds nothing and gives the same facts."""
    calls: list[str] = []
    first = Cache(tmp_path).get("things", KEY, "thing", write("one", calls))
    second = Cache(tmp_path).get("things", KEY, "thing", write("two", calls))
    assert first == second
    assert second.facts == {"fact": "yes"}
    assert calls == ["one"]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "about", "other-key"])
def test_cache_builds_a_damaged_entry_again(tmp_path: Path, damage: str) -> None:
    """Whatever happened to an entry, what is handed out hashes to what was recorded."""
    said: list[str] = []
    calls: list[str] = []
    store = Cache(tmp_path, report=said.append)
    entry = store.get("things", KEY, "thing", write("one", calls))
    about = entry.path.with_name("about.json")
    if damage == "flip":
        entry.path.write_bytes(bytes([entry.path.read_bytes()[0] ^ 1]) + entry.path.read_bytes()[1:])
    elif damage == "truncate":
        entry.path.write_bytes(b"")
    elif damage == "remove":
        entry.path.unlink()
    elif damage == "about":
        about.write_text("{")
    else:
        about.write_text(json.dumps({**json.loads(about.read_text()), "key": key_of({"a": 2})}))
    again = store.get("things", KEY, "thing", write("one", calls))
    assert again.sha256 == tarball.sha256_of(again.path) == entry.sha256
    assert calls == ["one", "one"]
    assert "damaged" in said[0]


def test_cache_failed_build_leaves_nothing(tmp_path: Path) -> None:
    """A build that raises is not an entry, and the next one starts clean."""

    def fail(target: Path) -> dict[str, str]:
        target.write_text("half")
        raise ArtifactError("no.")

    store = Cache(tmp_path)
    with pytest.raises(ArtifactError, match="no"):
        store.get("things", KEY, "thing", fail)
    assert list((tmp_path / "things").iterdir()) == []
    assert store.get("things", KEY, "thing", write("one", [])).path.read_text() == "one"


def test_cache_two_builders_at_once_build_once(tmp_path: Path) -> None:
    """Process A builds; process B waits, looks again, and takes A's."""
    log, release = tmp_path / "log", tmp_path / "release"
    children = [builder(tmp_path / "cache", log, release) for _ in range(2)]
    eventually(lambda: log.exists() and log.read_text().endswith("\n"))
    release.touch()
    digests = {child.communicate(timeout=60)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0, 0]
    assert len(digests) == 1
    assert len(log.read_text().splitlines()) == 1


def test_cache_killed_builder_blocks_nobody(tmp_path: Path) -> None:
    """The kernel releases a dead builder's lock, and its half is swept by the next one."""
    log, release = tmp_path / "log", tmp_path / "release"
    child = builder(tmp_path / "cache", log, release)
    eventually(lambda: log.exists() and log.read_text().endswith("\n"))
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=60)
    assert Cache(tmp_path / "cache").get("things", KEY, "thing", write("mine", [])).path.read_text() == "mine"
    assert [path.name for path in (tmp_path / "cache" / "things").iterdir()] == [KEY[:16]]


def test_cache_lock_wait_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A builder that never ends costs a bounded wait and a sentence, not a hang."""
    monkeypatch.setattr(cache, "LOCK_WAIT_S", 0.0)
    with Cache(tmp_path).locked("x"), pytest.raises(ArtifactError, match="has held"), Cache(tmp_path).locked("x"):
        pass


def test_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """The root is a file: the error names it and the variable that moves it."""
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match=r"cannot be written.*XDG_CACHE_HOME"):
        Cache(tmp_path / "file").get("things", KEY, "thing", write("one", []))


def test_cache_forgets_what_nobody_used(tmp_path: Path) -> None:
    """An entry that was not used for KEEP_S goes when another is built; one that was used stays."""
    store = Cache(tmp_path)
    keys = [key_of({"n": n}) for n in range(3)]
    entries = [store.get("things", key, "thing", write("x", [])) for key in keys[:2]]
    for entry in entries:
        os.utime(entry.path.with_name("about.json"), (0, 0))
    assert store.find("things", keys[0], "thing")
    store.get("things", keys[2], "thing", write("x", []))
    assert [entry.path.exists() for entry in entries] == [True, False]
