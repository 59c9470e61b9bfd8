# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A running Docker container as a sandbox.

Files travel through an exec's standard input and output, not through the engine's archive calls: measured equally
fast, and they land where the task sees them (tmpfs mounts, a read-only root), as the user that will read them. All that
is asked of the container is /bin/sh and cat. A `DockerSandbox` refuses to create, stop, pause or remove a container;
`own_container` is for whoever owns one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import docker

from boxstrap.controller.errors import EvidenceError, SandboxLost, UsageError
from boxstrap.controller.sandboxes.container import Container, Refused, Setting
from boxstrap.controller.sandboxes.engine import FAILURES, STDERR, STDOUT, ExecStream, in_thread, shared_client
from boxstrap.controller.sandboxes.output import DOWNLOAD_MAX, TRANSFER_TIMEOUT_S, BoundedText, Output, failed
from boxstrap.controller.sandboxes.talk import Talk

_READ = 1024 * 1024
_TOLD_MAX = 4096
_MISSING, _NOT_A_FILE = 44, 45
_IDLE = "trap 'exit 0' TERM; while :; do sleep 86400 & wait; done"

_UPLOAD = """umask 022
folder=${1%/*}
[ -z "$folder" ] || [ -d "$folder" ] || mkdir -p -- "$folder" || exit
{ if [ -n "$2" ]; then head -c "$2"; else cat; fi; } >"$1" || exit
if command -v wc >/dev/null 2>&1; then wc -c <"$1"; fi"""
_DOWNLOAD = f'[ -e "$1" ] || exit {_MISSING}; [ -f "$1" ] || exit {_NOT_A_FILE}; exec cat <"$1"'


class DockerSandbox:
    """A running container, by name or id. Implements `boxstrap.controller.sandbox.Sandbox`.

    An exec that times out or is cancelled has its process group killed where the engine is on this machine; with a
    remote engine the command goes on, and the message says so. A process that made a session of its own goes on in
    either case. A background child that holds the output open delays an exec by one second at most; what it prints
    after the command's own end is lost.
    """

    def __init__(
        self,
        container: str,
        *,
        client: docker.DockerClient | None = None,
        user: str | int | None = None,
        transfer_timeout_s: float = TRANSFER_TIMEOUT_S,
    ) -> None:
        self._container = Container(container, client)
        self._user = user
        self._transfer_timeout_s = transfer_timeout_s

    def __repr__(self) -> str:
        """Name the container."""
        return f"DockerSandbox({self._container.name!r})"

    def describe(self) -> str:
        """Name the container for a person: what was asked for, and what is known of it so far."""
        known = self._container.known
        if known is None:
            return f"docker container {self._container.name}"
        return f"docker container {known.name} ({known.id[:12]}, image {known.image})"

    @property
    def shares_host_network(self) -> bool:
        """Whether loopback in there is loopback out here. Before the first exec this asks the engine (blocking, 5 ms).

        Raises:
            SandboxLost: there is no such container, or no engine.
        """
        return self._container.facts().host_network

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = 180,
        user: str | int | None = None,
    ) -> Output:
        """Run `/bin/sh -c command`; `cwd` and `user` default to the container's own, `env` adds to its environment.

        Never raises for what happens in there. Return code 125 with `error_type`: "timeout", "sandbox_lost" (gone,
        stopped, paused, or the engine does not answer; noticed within two seconds), "exec_failed" (the engine refused).
        """
        kept = {STDOUT: BoundedText(), STDERR: BoundedText()}

        def sink(stream: int, chunk: bytes) -> None:
            kept[STDERR if stream == STDERR else STDOUT].add(chunk)

        def ended_badly(word: str, message: str) -> Output:
            return failed(word, message, stdout=kept[STDOUT].text(), stderr=kept[STDERR].text())

        try:
            code = await self._container.run(
                lambda _: ["/bin/sh", "-c", command], sink, self._setting(cwd, env, user), timeout_s=timeout_s
            )
        except TimeoutError as error:
            return ended_badly("timeout", str(error))
        except SandboxLost as error:
            return ended_badly("sandbox_lost", str(error))
        except Refused as error:
            return ended_badly("exec_failed", str(error))
        except OSError as error:  # the connection broke in a way that the SDK does not name
            return ended_badly("sandbox_lost", f"The connection to the Docker engine broke: {error}.")
        return Output(stdout=kept[STDOUT].text(), stderr=kept[STDERR].text(), return_code=code)

    @contextlib.asynccontextmanager
    async def converse(self, command: str, *, user: str | int | None = None) -> AsyncIterator[Talk]:
        """Run `/bin/sh -c command` with its standard streams open both ways; leaving lets go of it, and kills it where it can.

        Raises:
            SandboxLost: the container or the engine is gone.
            OSError: the engine could not start it (no such user).
        """
        talk = Talk()
        begun: asyncio.Future[ExecStream] = asyncio.get_running_loop().create_future()

        async def feed(stream: ExecStream) -> None:
            begun.set_result(stream)
            await asyncio.Event().wait()  # until the command ends: its input stays open

        def sink(which: int, chunk: bytes) -> None:
            if which != STDERR:
                talk.feed(chunk)

        async def run() -> None:
            try:
                await self._container.run(
                    lambda _: ["/bin/sh", "-c", command], sink, self._setting(user=user), timeout_s=None, feed=feed
                )
            except Refused as error:
                raise OSError(str(error)) from error
            finally:
                talk.end()

        running = asyncio.ensure_future(run())
        try:
            waited: set[asyncio.Future[Any]] = {running, begun}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not begun.done():
                await running
            else:
                talk.sender = begun.result().send
            yield talk
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def spawn(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
    ) -> None:
        """Start `/bin/sh -c command` and let go of it: its output goes nowhere, the engine reaps it.

        Raises:
            SandboxLost: the container or the engine is gone.
            OSError: the engine could not start it (no such user or folder).
        """
        try:
            await self._container.start(["/bin/sh", "-c", command], self._setting(cwd, env, user))
        except Refused as error:
            raise OSError(str(error)) from error

    async def upload(self, local_path: str | PathLike[str], remote_path: str) -> None:
        """Copy one host file in, streamed; it belongs to the exec's user with mode 0644, parent folders are made.

        Raises:
            SandboxLost: the container or the engine is gone.
            OSError: the sandbox could not write it (no permission, disk full), or wrote another size.
            TimeoutError: it took longer than `transfer_timeout_s`.
        """
        told = {STDOUT: BoundedText(_TOLD_MAX), STDERR: BoundedText(_TOLD_MAX)}
        with await in_thread(Path(local_path).open, "rb") as file:
            size = os.fstat(file.fileno()).st_size

            async def feed(stream: ExecStream) -> None:
                try:
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the size below judges
                        while chunk := await in_thread(file.read, _READ):
                            await stream.send(chunk)
                finally:
                    stream.end_input()

            def argv(can_end_input: bool) -> list[str]:
                return ["/bin/sh", "-c", _UPLOAD, "sh", remote_path, "" if can_end_input else str(size)]

            def sink(stream: int, chunk: bytes) -> None:
                told[STDERR if stream == STDERR else STDOUT].add(chunk)

            try:
                code = await self._container.run(argv, sink, self._setting(), timeout_s=self._transfer_timeout_s, feed=feed)
            except Refused as error:
                raise OSError(f"Upload to {remote_path} refused: {error}") from error
        arrived = told[STDOUT].text().strip()
        if code != 0 or (arrived.isdecimal() and int(arrived) != size):
            found = told[STDERR].text().strip() or f"exit status {code}, {arrived or 'an unknown number of'} bytes of {size}"
            raise OSError(f"Upload to {remote_path} failed inside {self.describe()}: {found}")

    async def download(self, remote_path: str, local_path: str | PathLike[str], *, max_bytes: int = DOWNLOAD_MAX) -> None:
        """Copy one sandbox file out, streamed; `local_path` appears when it is complete.

        Raises:
            FileNotFoundError: it is not there.
            EvidenceError: it is larger than `max_bytes`.
            SandboxLost: the container or the engine is gone.
            OSError: it is no regular file, or could not be read.
            TimeoutError: it took longer than `transfer_timeout_s`.
        """
        target = Path(local_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}-{time.monotonic_ns()}.part")
        said = BoundedText(_TOLD_MAX)
        taken = 0
        try:
            with partial.open("xb") as file:

                def sink(stream: int, chunk: bytes) -> None:
                    nonlocal taken
                    if stream == STDERR:
                        said.add(chunk)
                        return
                    taken += len(chunk)
                    if taken > max_bytes:
                        raise EvidenceError(
                            f"{remote_path} holds more than the {max_bytes} bytes that may come out of a sandbox."
                        )
                    file.write(chunk)

                argv = ["/bin/sh", "-c", _DOWNLOAD, "sh", remote_path]
                try:
                    code = await self._container.run(lambda _: argv, sink, self._setting(), timeout_s=self._transfer_timeout_s)
                except Refused as error:
                    raise OSError(f"Download of {remote_path} refused: {error}") from error
            if code == _MISSING and not taken:
                raise FileNotFoundError(f"No {remote_path} in {self.describe()}")
            if code:
                found = "it is no regular file" if code == _NOT_A_FILE else said.text().strip() or f"exit status {code}"
                raise OSError(f"Download of {remote_path} failed inside {self.describe()}: {found}")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    async def salvage(self, remote_path: str, local_path: Path, *, max_bytes: int = DOWNLOAD_MAX) -> None:
        """Copy one file out of the container's disk, in whatever state the container is; a tmpfs went with its processes.

        Raises:
            FileNotFoundError: it is not there.
            EvidenceError: it is larger than `max_bytes`, or no regular file.
            SandboxLost: the container or the engine is gone.
        """
        await in_thread(self._container.read_disk, remote_path, local_path, max_bytes)

    def _setting(self, cwd: str | None = None, env: Mapping[str, str] | None = None, user: str | int | None = None) -> Setting:
        return Setting(cwd=cwd, env=env, user=self._user if user is None else user)


@contextlib.contextmanager
def own_container(image: str, *, network: str | None = None, client: docker.DockerClient | None = None) -> Iterator[str]:
    """Make a container that idles, give its id, and remove it at the end. Blocking: for the command, not for a server.

    Raises:
        UsageError: there is no such image or network.
        SandboxLost: no engine answers.
    """
    engine = client if client is not None else shared_client()
    try:
        container = engine.containers.run(
            image,
            entrypoint=["/bin/sh", "-c", _IDLE],
            command=[],
            detach=True,
            network_mode=network,
            labels={"boxstrap": "own"},
        )
    except FAILURES as error:
        raise UsageError(f"No container of {image} could be made: {error}.", remedy="Check --image and --network.") from error
    try:
        yield str(container.id)
    finally:
        with contextlib.suppress(*FAILURES):
            container.remove(force=True)
