# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The boxes that the tests need: a name, a Dockerfile's folder, and where the base comes from. It makes nothing."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Box:
    """One kind of box, and how it is made."""

    name: str
    folder: str
    base: str
    """A box of ours (`boxstrap/…`), or a reference in an image registry."""
    script: tuple[str, ...] = ()
    """Makes the base where no image registry answers: argv below this folder; the path of the archive is added."""
    args: tuple[tuple[str, str], ...] = ()
    kept: bool = False
    """Making it needs the network, so that it is worth an archive in the cache."""
    optional: bool = False
    """Its absence is no failure unless it was asked for by name."""
    platform: str | None = None
    """Of another architecture than the machine's."""

    @property
    def tag(self) -> str:
        """The local tag."""
        return f"boxstrap/{self.name}" if ":" in self.name else f"boxstrap/{self.name}:latest"

    @property
    def parent(self) -> Box | None:
        """The box of ours that this one is built on."""
        return BOXES[self.base.removeprefix("boxstrap/")] if self.base.startswith("boxstrap/") else None

    @property
    def depth(self) -> int:
        """How many boxes of ours lie below."""
        return self.parent.depth + 1 if self.parent else 0

    @functools.cached_property
    def digest(self) -> str:
        """Digest of everything that decides what is in the box, but for the outside world."""
        recipe = hashlib.sha256(repr((self.base, self.script, self.args)).encode())
        recipe.update((HERE / self.folder / "Dockerfile").read_bytes())
        if self.script:
            recipe.update((HERE / self.script[0]).read_bytes())
        if self.parent:
            recipe.update(self.parent.digest.encode())
        return recipe.hexdigest()[:16]


def debian(version: int, codename: str) -> Box:
    """A Debian of the given version."""
    script = ("debian/from-packages.sh", codename)
    return Box(f"debian:{version}", "plain", f"debian:{version}-slim", script=script, kept=True)


BOXES = {
    box.name: box
    for box in (
        debian(11, "bullseye"),
        debian(12, "bookworm"),
        debian(13, "trixie"),
        Box("ubuntu:22.04", "plain", "ubuntu:22.04", kept=True, optional=True),
        Box("ubuntu:24.04", "plain", "ubuntu:24.04", kept=True, optional=True),
        Box("alpine:3.22", "plain", "alpine:3.22", script=("alpine/from_wheel.py", "1"), kept=True),
        Box("python-alpine:3.12", "python-alpine", "python:3.12-alpine", script=("alpine/from_wheel.py", "5"), kept=True),
        Box("busybox", "busybox", "boxstrap/debian:12", kept=True),
        Box("noshell", "noshell", "boxstrap/busybox"),
        Box(
            "debian-arm64:12",
            "plain",
            "debian:12-slim",
            script=("debian/arm64.py", "bookworm"),
            kept=True,
            optional=True,
            platform="linux/arm64",
        ),
        Box("task", "task", "boxstrap/debian:12", kept=True),
        Box("toolchains", "toolchains", "boxstrap/task", kept=True),
        Box("task13", "task", "boxstrap/debian:13", kept=True),
        Box("nonroot", "nonroot", "boxstrap/debian:12"),
        Box("uid1234", "uid1234", "boxstrap/debian:12"),
        *(
            Box(f"no-{tool}", "without", "boxstrap/debian:12", args=(("TOOL", tool),))
            for tool in ("flock", "tar", "sha256sum", "gzip")
        ),
    )
}
