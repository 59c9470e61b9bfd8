# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Takes Alpine out of a package of the Python package index: `from_wheel.py LAYERS OUT.tar`.

flashvm's wheel carries the official python:3.12-alpine as an OCI layout: layer 1 is the unmodified Alpine root file
system, all five are musl with a Python. The wheel is pinned by its hash and never imported. The layout is rewritten
as the archive that `docker load` of every engine understands (20.10 cannot load an OCI layout).
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

REQUIREMENT = "flashvm==0.1.3 --hash=sha256:c199e9945e0b28e88678fd0c136abd0f4828087658ca6373ebd009a8b59a6ed0\n"
LAYOUT = Path("flashvm/data/oci")


def main(layers: int, out: Path) -> None:
    """Writes a docker-archive with the first `layers` layers to `out`."""
    with tempfile.TemporaryDirectory() as folder:
        fetch(Path(folder))
        rewrite(Path(folder, LAYOUT, "blobs", "sha256"), layers=layers, out=out)


def fetch(folder: Path) -> None:
    """Unpacks the wheel into `folder`; uv refuses one with another hash."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        sys.exit("from_wheel.py: uv is missing: it comes with the project's dependencies")
    requirements = folder / "requirements.txt"
    requirements.write_text(REQUIREMENT, encoding="ascii")
    command: list[str | Path] = [
        uv,
        "--quiet",
        "--no-config",
        "pip",
        "install",
        "--target",
        folder,
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    command += ["--require-hashes", "--python-platform", "x86_64-manylinux_2_39", "--requirements", requirements]
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(f"from_wheel.py: uv could not fetch {REQUIREMENT.split(maxsplit=1)[0]} (exit {code}, its words are above)")


def rewrite(blobs: Path, *, layers: int, out: Path) -> None:
    """Makes a docker-archive of the one image in an OCI layout's blobs."""
    index = json.loads((blobs.parent.parent / "index.json").read_bytes())
    manifest = load(blobs, index["manifests"][0])
    config = load(blobs, manifest["config"])
    config["rootfs"]["diff_ids"] = config["rootfs"]["diff_ids"][:layers]
    del config["history"]  # it would have to agree with the layers, and says nothing that a test needs
    if layers == 1:
        config["config"] = {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"], "Cmd": ["/bin/sh"]}
    names = [f"{layer['digest'].removeprefix('sha256:')}.tar" for layer in manifest["layers"][:layers]]
    with tarfile.open(out, "w") as archive:
        add(archive, "config.json", json.dumps(config).encode())
        for name in names:
            archive.add(blobs / name.removesuffix(".tar"), arcname=name)
        add(archive, "manifest.json", json.dumps([{"Config": "config.json", "RepoTags": None, "Layers": names}]).encode())


def load(blobs: Path, descriptor: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON object that a descriptor points at."""
    loaded: dict[str, Any] = json.loads((blobs / descriptor["digest"].removeprefix("sha256:")).read_bytes())
    return loaded


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    """Adds a file that exists in memory only."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
