# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Every path under /opt and /tmp. No other Python file spells one; prelude.sh spells the few it needs in one place.

Paths are POSIX paths inside the sandbox and plain strings on the host (PurePosixPath), so that both sides may use this.
It refuses to touch the file system.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

DIGEST_CHARS = 16
"""How much of a digest a path uses."""
STAGE = ".stage-"
LOCK = ".lock-"
"""What the names of stages and locks in a runtime root begin with; prelude.sh spells them too."""


def default_runtime_root(agent: str) -> str:
    """Where an agent's runtimes are published unless told otherwise."""
    return f"/opt/nemo-gym-{agent}"


def default_session_root(agent: str) -> str:
    """Where an agent's session folders live unless told otherwise."""
    return f"/tmp/nemo-gym-{agent}"


@dataclass(frozen=True)
class RuntimePaths:
    """One published runtime: `<root>/<digest16>`."""

    root: str
    digest: str

    @property
    def path(self) -> str:
        """The final name."""
        return f"{self.root}/{self.digest[:DIGEST_CHARS]}"

    @property
    def python(self) -> str:
        """The interpreter that we supply."""
        return f"{self.path}/python/bin/python3"

    @property
    def site(self) -> str:
        """The payload: the agent's packages, or its binary under bin/."""
        return f"{self.path}/site"

    @property
    def app(self) -> str:
        """Our own code, extracted from the archive."""
        return f"{self.path}/app"

    @property
    def archive(self) -> str:
        """The archive itself, for whoever is inside the container."""
        return f"{self.path}/boxstrap.pyz"

    @property
    def manifest(self) -> str:
        """Written last: every file with its size and sha256."""
        return f"{self.path}/manifest.json"

    @property
    def lock(self) -> str:
        """Held by whoever makes it."""
        return f"{self.root}/{LOCK}{self.digest[:DIGEST_CHARS]}"

    @property
    def stages(self) -> str:
        """What the name of each stage of it begins with; the pid of who makes it follows."""
        return f"{self.root}/{STAGE}{self.digest[:DIGEST_CHARS]}-"


@dataclass(frozen=True)
class StagePaths(RuntimePaths):
    """A runtime that is being made: `<root>/.stage-<digest16>-<pid>`."""

    pid: int

    @property
    def path(self) -> str:
        """The name until it is published."""
        return f"{self.stages}{self.pid}"


@dataclass(frozen=True)
class SessionPaths:
    """One session folder: `<session-root>/<session-id>`, mode 0700."""

    path: str

    @classmethod
    def of(cls, root: str, session_id: str) -> SessionPaths:
        """Name the folder of a session."""
        return cls(str(PurePosixPath(root) / session_id))

    def __getattr__(self, name: str) -> str:
        """Give the path of a named member, for example `paths.receipt`."""
        try:
            return f"{self.path}/{_SESSION_MEMBERS[name]}"
        except KeyError:
            raise AttributeError(name) from None


_SESSION_MEMBERS = {
    "request": "request.json",
    "sink": "sink.json",
    "home": "home",
    "tmp": "tmp",
    "evidence": "evidence.ndjson",
    "agent_out": "agent.out",
    "agent_err": "agent.err",
    "agent_env": "agent.env",
    "claim": "launch.claim",
    "prewarm": "prewarm.json",
    "warm": "warm",
    "supervisor": "supervisor.json",
    "supervisor_log": "supervisor.log",
    "stop": "stop",
    "receipt": "receipt.json",
    "artifacts": "artifacts",
    "lock": "lock",
    "relay": "relay.sock",
    "reserve": "reserve",
    "resources_cookies": "resources_cookies.json",
}


def push_folder(session_root: str, token: str) -> str:
    """Where the controller puts what it pushes, before it is installed; removed afterwards."""
    return f"{session_root}/.push-{token}"
