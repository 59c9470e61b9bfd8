# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Makes an arm64 Debian on a machine of another architecture: `arm64.py CODENAME OUT.tar`.

`docker import` of older engines records their own architecture, so the root file system becomes an archive for
`docker load` that tells the true one. Its packages are unpacked, not configured: no program of it runs while it is made.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(codename: str, out: Path) -> None:
    """Writes a docker-archive to `out`."""
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        layer = Path(folder, "layer.tar")
        for command in (["emulation.sh"], ["from-packages.sh", codename, str(layer), "arm64"]):
            if code := subprocess.run(["sh", str(HERE / command[0]), *command[1:]], check=False).returncode:
                sys.exit(code)
        with layer.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        config = {
            "architecture": "arm64",
            "os": "linux",
            "config": {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"], "Cmd": ["bash"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
        manifest = [{"Config": "config.json", "RepoTags": None, "Layers": ["layer.tar"]}]
        with tarfile.open(out, "w") as archive:
            archive.add(layer, arcname="layer.tar")
            for name, content in (("config.json", config), ("manifest.json", manifest)):
                member = tarfile.TarInfo(name)
                member.size = len(raw := json.dumps(content).encode())
                archive.addfile(member, io.BytesIO(raw))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
