# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Makes the boxes that the tests need: `python images/build.py [--list] [NAME…]`.

Every box is a Dockerfile beside this file. Its base comes from an image registry where one answers (BOXSTRAP_REGISTRY
names a mirror, as in `mirror.example/library/`), else from package registries by the recipe's own script, else not at
all: a box that cannot be had is absent, with the reason, and never an imitation under its name. A label holds the
digest of the recipe, so that a changed recipe is made anew. What needed the network is kept as an archive under the
user's cache folder, so that a fresh engine has it within seconds.

Exit status: 0 when all boxes asked for are there (without names: all but the optional ones), else 1.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import docker
import platformdirs
import requests
from boxes import BOXES, HERE, Box
from docker.errors import APIError, BuildError, DockerException, ImageNotFound

LABEL = "boxstrap.recipe"
WORKERS = 2
"""Boxes made at once: mmdebstrap keeps one core busy."""
SCRIPT_WITHIN_S = 900
PROBE_WITHIN_S = 15


class Absent(Exception):
    """A box cannot be had here; the text says why."""


class Store:
    """The engine's images and the archives in the cache."""

    def __init__(self, client: docker.DockerClient, *, cache: Path) -> None:
        self.client = client
        self.cache = cache
        self.packer = "zstd" if shutil.which("zstd") else "gzip"

    def state(self, box: Box) -> str:
        """Says `present`, or why the box is not."""
        try:
            image = self.client.images.get(box.tag)
        except ImageNotFound:
            return "not made yet"
        return "present" if image.labels.get(LABEL) == box.digest else "made by an older recipe"

    def archive(self, box: Box) -> Path:
        """Where the box's archive is, or would be."""
        return self.cache / f"{box.name.replace(':', '-')}-{box.digest}.tar.{self.packer}"

    def load(self, box: Box) -> bool:
        """Loads the box from its archive; False when there is none, or none that holds it."""
        if not self.archive(box).is_file():
            return False
        with subprocess.Popen([self.packer, "-dc", self.archive(box)], stdout=subprocess.PIPE) as unpack:
            assert unpack.stdout  # noqa: S101 - PIPE was asked for
            try:
                self.client.images.load(unpack.stdout)
            except DockerException:  # a damaged archive: what it held is made anew
                unpack.kill()
        return self.state(box) == "present"

    def keep(self, box: Box) -> None:
        """Writes the box's archive, and removes those of older recipes."""
        final = self.archive(box)
        self.cache.mkdir(parents=True, exist_ok=True)
        part = final.with_name(f"{final.name}.{os.getpid()}")
        with part.open("wb") as out, subprocess.Popen([self.packer, "-c"], stdin=subprocess.PIPE, stdout=out) as pack:
            assert pack.stdin  # noqa: S101 - PIPE was asked for
            for chunk in self.client.images.get(box.tag).save(named=box.tag):
                pack.stdin.write(chunk)
        if pack.returncode:
            part.unlink()
            return  # a full disk costs time on the next engine, not this box
        part.rename(final)
        for old in self.cache.glob(f"{box.name.replace(':', '-')}-{'?' * 16}.tar.*"):
            if old != final:
                old.unlink()

    def build(self, box: Box) -> None:
        """Makes the box from its recipe.

        Raises:
            Absent: It cannot be made here.
        """
        if box.parent and self.state(box.parent) != "present":
            raise Absent(f"{box.base}, which it stands on, is absent")
        base = box.base if box.parent else self.fetch(box)
        try:
            self.client.images.build(
                path=str(HERE / box.folder),
                tag=box.tag,
                buildargs={"BASE": base, **dict(box.args)},
                labels={LABEL: box.digest},
                network_mode="host",  # the resolver of a default bridge may not be the machine's
                rm=True,
                forcerm=True,
            )
        except BuildError as error:
            said = [str(line["stream"]).strip() for line in error.build_log if "stream" in line]
            raise Absent(f"{error.msg}; before it: {' | '.join(said[-3:])}") from error
        except APIError as error:
            raise Absent(str(error.explanation or error)) from error
        if box.kept:
            self.keep(box)

    def fetch(self, box: Box) -> str:
        """Returns the box's base as something that FROM understands, pulled or made.

        Raises:
            Absent: Neither worked.
        """
        reference = os.environ.get("BOXSTRAP_REGISTRY", "") + box.base
        refusal = self.registry_refusal
        if not refusal:
            try:
                self.client.images.pull(reference, platform=box.platform)
                return reference
            except APIError as error:
                refusal = str(error.explanation or error)
        if not box.script:
            raise Absent(f"{reference} cannot be pulled, and there is no other recipe: {refusal}")
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "base.tar")
            run_script(box, out)
            if box.script[0].endswith(".py"):  # it writes an archive for `docker load`, the others a root file system
                with out.open("rb") as stream:
                    return str(self.client.images.load(stream)[0].id)
            answer = self.client.api.import_image_from_file(str(out))
            return str(json.loads(answer.splitlines()[-1])["status"])

    @functools.cached_property
    def registry_refusal(self) -> str:
        """Why no image registry answers; empty when one does. Asked once, within a bound."""
        reference = os.environ.get("BOXSTRAP_REGISTRY", "") + BOXES["debian:12"].base
        probe = docker.from_env(timeout=PROBE_WITHIN_S)
        try:
            probe.api.inspect_distribution(reference)  # type: ignore[no-untyped-call]
        except (DockerException, requests.RequestException) as error:
            return f"no image registry answers ({getattr(error, 'explanation', None) or error})"
        finally:
            probe.close()
        return ""


def run_script(box: Box, out: Path) -> None:
    """Runs the script that makes a box's base.

    Raises:
        Absent: It failed, or took too long.
    """
    program = [sys.executable] if box.script[0].endswith(".py") else ["sh"]
    command = [*program, str(HERE / box.script[0]), *box.script[1:], str(out)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace", timeout=SCRIPT_WITHIN_S)
    except subprocess.TimeoutExpired as error:
        raise Absent(f"{box.script[0]} was stopped after {SCRIPT_WITHIN_S} s") from error
    if done.returncode:
        raise Absent(f"{box.script[0]} exited {done.returncode}: {' | '.join(done.stderr.strip().splitlines()[-3:])}")


def make(store: Store, names: Iterable[str], *, report: Callable[[str, str, float], None]) -> dict[str, str]:
    """Makes the named boxes and what they stand on; returns name -> reason for the absent ones."""
    absent: dict[str, str] = {}

    def one(box: Box) -> None:
        began = time.monotonic()
        try:
            store.build(box)
            report(box.tag, "made", time.monotonic() - began)
        except Absent as reason:
            absent[box.name] = str(reason)
            report(box.tag, f"absent: {reason}", time.monotonic() - began)

    missing: dict[str, Box] = {}
    found: set[str] = set()
    queue = [BOXES[name] for name in names]
    while queue:
        box = queue.pop(0)
        began = time.monotonic()
        if box.name in missing or box.name in found:
            continue
        if present := store.state(box) == "present":
            if box.kept and not store.archive(box).is_file():
                store.keep(box)
        elif not store.load(box):
            missing[box.name] = box
            queue += [box.parent] if box.parent else []
            continue
        found.add(box.name)
        report(box.tag, "present" if present else "loaded", time.monotonic() - began)
    for depth in sorted({box.depth for box in missing.values()}):
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(one, [box for box in missing.values() if box.depth == depth]))
    return absent


def say(line: str) -> None:
    """Prints a line whole, and at once, whichever thread says it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextmanager
def alone(cache: Path) -> Iterator[None]:
    """Holds the lock that keeps two builds from making the same boxes twice."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:  # never unlinked
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Parses the command line and makes, or lists, boxes."""
    parser = argparse.ArgumentParser(description="Makes the boxes that the tests need.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BOXES)}; default: all")
    parser.add_argument("--list", action="store_true", help="say what is there, and make nothing")
    asked = parser.parse_args()
    if unknown := [name for name in asked.names if name not in BOXES]:
        parser.error(f"no such box: {', '.join(unknown)}; there are {', '.join(BOXES)}")
    names = asked.names or list(BOXES)
    cache = platformdirs.user_cache_path("boxstrap") / "images"
    try:
        store = Store(docker.from_env(timeout=600), cache=cache)
        store.client.ping()
    except (DockerException, requests.RequestException) as error:
        sys.exit(f"build.py: no Docker engine answers (sh images/engine.sh starts one): {error}")
    if asked.list:
        states = {name: store.state(BOXES[name]) for name in names}
        absent = {name: state for name, state in states.items() if state != "present"}
        for name, state in states.items():
            say(f"{BOXES[name].tag:<28} {'absent: ' if name in absent else ''}{state}")
    else:
        with alone(cache):
            absent = make(store, names, report=lambda tag, word, took: say(f"{tag:<28} {took:5.1f} s  {word}"))
    return int(any(asked.names or not BOXES[name].optional for name in absent if name in names))


if __name__ == "__main__":
    sys.exit(main())
