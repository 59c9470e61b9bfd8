# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Containers for tests: what the owner of a sandbox does. It makes no images (images/build.py does)."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import socket
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import docker
from docker.errors import APIError, NotFound
from docker.models.containers import Container

SLEEP = ["sleep", "2147483647"]
"""PID 1 of every box: the one program that all of them have."""
OWNER = "boxstrap.test"
"""Label: host name and process id of the test run that a container or network belongs to."""


class Ran(NamedTuple):
    """What an exec left behind."""

    code: int
    out: bytes
    err: bytes


class InternalNetwork(NamedTuple):
    """A network on which a container reaches this host (older engines: at any of its addresses), and nothing beyond it."""

    name: str
    host: str
    """Address for a server on the host to bind, and for containers to connect to."""


@dataclass(frozen=True)
class Box:
    """A running container."""

    container: Container

    @property
    def id(self) -> str:
        """The engine's full id."""
        return str(self.container.id)

    @property
    def name(self) -> str:
        """The engine's name for it."""
        return str(self.container.name)

    def exec(
        self,
        cmd: str | Sequence[str],
        *,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        privileged: bool = False,
    ) -> Ran:
        """Runs a command to its end; a string goes to the box's `sh -c`, a list is argv.

        A program that is not there is code 126 or 127 with the engine's words in `out`; nothing is raised.
        """
        argv = ["sh", "-c", cmd] if isinstance(cmd, str) else list(cmd)
        client = self.container.client
        assert client
        api = client.api
        started = api.exec_create(
            self.id, argv, user=user or "", environment=dict(env or {}), workdir=cwd, privileged=privileged
        )["Id"]
        out, err = api.exec_start(started, demux=True)
        return Ran(int(api.exec_inspect(started)["ExitCode"]), out or b"", err or b"")

    def check(self, cmd: str | Sequence[str], *, user: str | None = None, env: Mapping[str, str] | None = None) -> str:
        """Runs a command that must exit 0, and returns its stdout as text without the last newline."""
        ran = self.exec(cmd, user=user, env=env)
        assert ran.code == 0, f"{cmd!r} exited {ran.code}: {(ran.out + ran.err).decode(errors='replace')}"
        return ran.out.decode().rstrip("\n")

    def put(self, local: str | os.PathLike[str], remote: str, *, uid: int = 0, gid: int = 0) -> None:
        """Copies a file or a folder to the absolute path `remote`, making folders above it; modes are kept.

        Like `docker cp`, it needs no tool in the box, does not see tmpfs mounts, and is refused in a read-only box.
        """

        def owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
            member.uid, member.gid, member.uname, member.gname = uid, gid, "", ""
            return member

        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(Path(local), arcname=remote.strip("/"), filter=owned)
        assert self.container.put_archive("/", packed.getvalue())

    def diff(self) -> list[str]:
        """Says what differs from the image, as `docker diff` does: `A /opt/x`, `C /opt`, `D /etc/y`; sorted by path."""
        changes = cast("list[dict[str, Any]] | None", self.container.diff()) or []  # the stubs say str
        return [
            f"{'CAD'[change['Kind']]} {change['Path']}" for change in sorted(changes, key=lambda change: str(change["Path"]))
        ]

    def kill(self) -> None:
        """Kills every process in the box at once; its file system stays until the end of the test."""
        self.container.kill()
        self.container.wait()

    def restart(self) -> None:
        """Kills the processes in the box and starts it again on the same file system."""
        self.container.restart(timeout=0)

    def pause(self) -> None:
        """Freezes the box: execs are refused, and what runs does not run on."""
        self.container.pause()

    def unpause(self) -> None:
        """Lets a frozen box run on."""
        self.container.unpause()

    def remove(self) -> None:
        """Removes the box, whatever state it is in; one that is gone is fine."""
        with contextlib.suppress(APIError):  # else the engine may wait for minutes for frozen processes to die
            self.container.unpause()
        try:
            self.container.remove(force=True, v=True)
        except NotFound:
            return
        except APIError as error:
            if error.status_code != 409:  # somebody else removes it at this moment
                raise


class Containers:
    """Starts boxes that only sleep, and removes them at the end: `box = containers("debian:12", network="none")`."""

    def __init__(self, client: docker.DockerClient, *, tag_of: Callable[[str], str]) -> None:
        self.client = client
        self.tag_of = tag_of
        self.boxes: list[Box] = []

    def __call__(
        self,
        image: str,
        *,
        network: str | None = None,
        user: str | None = None,
        tmpfs: Mapping[str, str] | None = None,
        read_only: bool = False,
        env: Mapping[str, str] | None = None,
        volumes: Sequence[str] = (),
        init: bool = False,
        memory: str | None = None,
        pids: int | None = None,
        extra_hosts: Mapping[str, str] | None = None,
    ) -> Box:
        """Starts a box of images/build.py: `tmpfs` is path -> options, `volumes` are `/host:/box:ro`, `memory` is `64m`."""
        created = self.client.containers.create(
            self.tag_of(image),
            SLEEP,
            name=fresh_name(),
            labels={OWNER: owner()},
            network=network,
            user=user,
            tmpfs=dict(tmpfs or {}),
            read_only=read_only,
            environment=dict(env or {}),
            volumes=list(volumes),
            init=init,
            mem_limit=memory,
            pids_limit=pids,
            extra_hosts=dict(extra_hosts or {}),
        )
        self.boxes.append(Box(created))
        created.start()
        return self.boxes[-1]

    def remove(self) -> None:
        """Removes every box that was started here."""
        while self.boxes:
            self.boxes.pop().remove()


@contextlib.contextmanager
def internal_network(client: docker.DockerClient) -> Iterator[InternalNetwork]:
    """Makes a network without a way out, and removes it."""
    network = client.networks.create(fresh_name(), internal=True, labels={OWNER: owner()})
    try:
        network.reload()
        yield InternalNetwork(str(network.name), str(network.attrs["IPAM"]["Config"][0]["Gateway"]))
    finally:
        network.reload()
        for attached in network.containers:  # whichever fixture ends first
            network.disconnect(attached, force=True)
        network.remove()


def fresh_name() -> str:
    """Returns a name that nothing else on the engine has."""
    return f"boxstrap-test-{secrets.token_hex(5)}"


def owner() -> str:
    """Returns the label's value for this process."""
    return f"{socket.gethostname()}:{os.getpid()}"


def sweep(client: docker.DockerClient) -> None:
    """Removes what killed test runs of this host left: networks are few, and an engine runs out of them."""
    for box in client.containers.list(all=True, filters={"label": OWNER}):
        if orphaned(box.labels[OWNER]):
            with contextlib.suppress(APIError):  # another run may be sweeping it; removing a paused one takes a minute
                if box.status == "paused":
                    box.unpause()
                Box(box).remove()
    for network in client.networks.list(filters={"label": OWNER}):
        if orphaned(network.attrs["Labels"][OWNER]):
            network.remove()


def orphaned(label: str) -> bool:
    """True when the label names a process of this host that is no more."""
    host, _, pid = label.rpartition(":")
    return host == socket.gethostname() and not Path("/proc", pid).exists()
