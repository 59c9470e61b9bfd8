# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What was built once: one folder for each digest of inputs, with the artifact and an about.json that is written last.

Process A builds under a lock that the kernel releases; process B waits for it, looks again, and finds A's entry. A reader
needs no lock: an entry appears by one rename. Every use hashes the artifact again, so a flipped byte is found before it
is pushed. It refuses to guess: an entry that does not agree with itself is built anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from boxstrap.controller.errors import ArtifactError
from boxstrap.controller.tarball import sha256_of

Reporter = Callable[[str], None]
"""Gets one short sentence for each slow or surprising step."""

LOCK_WAIT_S = 900.0
"""Seconds to wait for another process that builds the same thing."""
KEEP_S = 30 * 86400.0
"""Seconds for which an entry stays that nobody uses."""


def default_root() -> Path:
    """Where artifacts are kept unless told otherwise."""
    return Path(platformdirs.user_cache_dir("boxstrap"))


def quiet(_: str) -> None:
    """Report to nobody."""


def key_of(inputs: Mapping[str, object]) -> str:
    """Return the digest (hex) of an artifact's inputs: sorted canonical JSON."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()


def code_of(*modules: str) -> str:
    """Return the digest of the code that builds: part of each key, so that nobody has to remember to raise a number."""
    shared = ("bytecode", "elf", "tarball")
    here = Path(__file__).parent
    names = [*shared, *(module.rpartition(".")[2] for module in modules)]
    return key_of({name: sha256_of(here / f"{name}.py") for name in names})


@dataclass(frozen=True)
class Entry:
    """A cached artifact that agrees with its about.json. `facts` is what its builder said of it."""

    path: Path
    sha256: str
    facts: dict[str, str]


class Cache:
    """A folder of entries: `<root>/<kind>/<key16>/{<name>, about.json}`."""

    def __init__(self, root: Path | None = None, *, report: Reporter | None = None) -> None:
        self.root = root or default_root()
        self.report = report or quiet

    def folder(self, kind: str, key: str) -> Path:
        """Name an entry's folder."""
        return self.root / kind / key[:16]

    def find(self, kind: str, key: str, name: str) -> Entry | None:
        """Return the entry, or None when it is not there or does not agree with itself."""
        folder = self.folder(kind, key)
        try:
            about = json.loads((folder / "about.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:
            about = {}
        artifact = folder / name
        if (
            not isinstance(about, dict)
            or about.get("key") != key
            or not artifact.is_file()
            or sha256_of(artifact) != about.get("sha256")
        ):
            self.report(f"the cached {kind} {key[:16]} is damaged: building it again")
            return None
        with suppress(OSError):  # a cache that cannot be written can still be read
            os.utime(folder / "about.json")
        return Entry(artifact, str(about["sha256"]), {str(k): str(v) for k, v in about.get("facts", {}).items()})

    def get(self, kind: str, key: str, name: str, build: Callable[[Path], Mapping[str, str]]) -> Entry:
        """Return the entry; when it is missing, `build(target)` writes the artifact and returns facts about it.

        Raises:
            ArtifactError: the build failed, or another process held the lock for too long.
        """
        found = self.find(kind, key, name)
        if found:
            return found
        folder = self.folder(kind, key)
        with self.locked(f"{kind}-{key[:16]}"):
            found = self.find(kind, key, name)
            if found:
                return found
            stage = folder.with_name(
                f".stage-{folder.name}"
            )  # ours alone: we hold the lock, so what is there is a dead builder's
            shutil.rmtree(stage, ignore_errors=True)
            try:
                stage.mkdir(parents=True)
                facts = dict(build(stage / name))
                about = {"key": key, "sha256": sha256_of(stage / name), "facts": facts}
                (stage / "about.json").write_text(json.dumps(about, indent=1, sort_keys=True) + "\n")
                shutil.rmtree(folder, ignore_errors=True)
                stage.rename(folder)
            except OSError as error:
                raise self._unwritable(error) from error
            finally:
                shutil.rmtree(stage, ignore_errors=True)
        self._sweep(folder.parent)
        return Entry(folder / name, str(about["sha256"]), facts)

    def _sweep(self, kind: Path) -> None:
        """Forget what nobody used for KEEP_S; each use touches its about.json."""
        for about in kind.glob("*/about.json"):
            with suppress(OSError):
                if time.time() - about.stat().st_mtime > KEEP_S:
                    shutil.rmtree(about.parent)

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold one named lock of this cache; the file is never unlinked.

        Raises:
            ArtifactError: the wait was longer than LOCK_WAIT_S, or the cache cannot be written.
        """
        path = self.root / ".locks" / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            self._wait_for(handle, path)
            yield
        finally:
            os.close(handle)

    def _unwritable(self, error: OSError) -> ArtifactError:
        return ArtifactError(
            f"The cache {self.root} cannot be written: {error.strerror or error}.",
            remedy="Make room there, or set XDG_CACHE_HOME to another folder.",
        )

    def _wait_for(self, handle: int, path: Path) -> None:
        until = time.monotonic() + LOCK_WAIT_S
        said = False
        while True:
            try:
                return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise ArtifactError(
                        f"Another process has held {path} for {LOCK_WAIT_S:.0f} s.", remedy="Look what it does, then try again."
                    ) from None
                if not said:
                    self.report(f"waiting for another process that builds {path.name}")
                    said = True
                time.sleep(0.1)
