# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""One running container: run a command in it, and notice within two seconds when it is no longer there.

While a command runs, two things are waited for at once: the conversation with the engine, and a look at the container
every `WATCH_S`. The look asks the engine's *list*, since inspect waits for a lock that an exec start holds for as long
as the container is frozen. It refuses to change the container's state.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import shutil
import tarfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import docker
import docker.errors
import requests

from boxstrap.controller.cancelling import carry_through
from boxstrap.controller.errors import EvidenceError, SandboxLost
from boxstrap.controller.sandboxes.engine import FAILURES, ExecStream, forget, in_thread, shared_client
from boxstrap.controller.sandboxes.output import DRAIN_S

T = TypeVar("T")
Sink = Callable[[int, bytes], None]
Feed = Callable[[ExecStream], Awaitable[None]]

WATCH_S = 1.0
"""Seconds between two looks at the container while something runs in it: how late a pause is noticed."""
_KILL_WAIT_S = 3.0
_START_WAIT_S = 0.5  # an exec that was being started when it was cancelled has a process by then, or never
_DISK_CHUNK = 512 * 1024
_FIRST_ASK_S, _LAST_ASK_S = 0.5, 5.0  # how often the engine is asked whether a silent exec still runs
_SUSPICIOUS = 125  # a command that ended with this or more may have ended because its container did
_KILLED = 128 + 9
_LOOKS_S = (0.0, 0.1, 0.2, 0.4)  # a dying container's execs are reported before the container itself
_STATES = {"paused": "is paused", "exited": "has stopped", "dead": "is dead", "created": "was never started"}


class Refused(Exception):
    """The engine would not run the command, though the container is well: an unknown user, for example."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the engine said of the container when it was first looked at."""

    id: str
    name: str
    image: str
    host_network: bool


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and as whom a command runs; None is the container's own."""

    cwd: str | None = None
    env: Mapping[str, str] | None = None
    user: str | int | None = None

    def options(self) -> dict[str, Any]:
        """Give what `exec_create` of the SDK takes."""
        return {
            "workdir": self.cwd,
            "environment": None if self.env is None else dict(self.env),
            "user": "" if self.user is None else str(self.user),
        }


class Container:
    """A running container by name or id; nothing is asked of the engine before it is needed."""

    def __init__(self, name: str, client: docker.DockerClient | None) -> None:
        self.name = name
        self.known: Facts | None = None
        self._client = client
        self._looked_at = -WATCH_S
        self._trouble: str | None = None

    def facts(self) -> Facts:
        """Find the container; asked once. Blocking.

        Raises:
            SandboxLost: there is none of that name, or no engine.
        """
        if self.known is None:
            with _translated():
                for filters in ({"name": f"^/?{re.escape(self.name)}$"}, {"id": self.name}):
                    found = self._engine().api.containers(all=True, filters=filters)
                    if len(found) == 1:
                        self.known = _facts_from(found[0])
                        break
                else:
                    raise SandboxLost(f"There is no container {self.name}.", remedy="`docker ps` lists those that run.")
        return self.known

    async def run(
        self,
        argv: Callable[[bool], list[str]],
        sink: Sink,
        setting: Setting,
        *,
        timeout_s: float | None,
        feed: Feed | None = None,
    ) -> int:
        """Run one exec to its end and give its exit status.

        Args:
            argv: gives the command; told whether the connection can end the command's input (False over TLS and ssh).
            sink: takes (stream, bytes) as they come; what it raises ends the exec.
            setting: where and as whom.
            timeout_s: seconds, or None for no bound.
            feed: writes the command's standard input; without it that is /dev/null.

        Raises:
            SandboxLost: the container or the engine is gone, or the container is paused.
            TimeoutError: it took longer; its process group was killed where that was possible.
            Refused: the engine would not run it.
        """
        started: list[str] = []
        ended = False

        async def talk() -> int:
            client = await in_thread(self._engine)
            facts = await in_thread(self.facts)
            command = argv(_can_end_input(client))
            created = await in_thread(client.api.exec_create, facts.id, command, stdin=feed is not None, **setting.options())
            started.append(created["Id"])
            stream = await ExecStream.start(client, created["Id"])
            try:
                return await _converse(client, created["Id"], stream, sink, feed)
            finally:
                stream.close()

        try:
            code = await self._guard(talk(), timeout_s)
            ended = True
        except TimeoutError:
            ended = bool(started) and await self._kill_now(started[0])
            fate = "It was killed." if ended else "It may still be running in the container."
            raise TimeoutError(f"The command did not end within {timeout_s:g} s. {fate}") from None
        except asyncio.CancelledError:
            if started:  # whoever cancels tidies up next, and the command must not go on meanwhile
                ended = await carry_through(self._kill_now(started[0]))
            raise
        except Refused:
            if trouble := await in_thread(self._look):  # the engine has many words for a container that is going
                raise SandboxLost(trouble) from None
            raise
        finally:
            if started and not ended:
                forget(self._kill, started[0])
        looks = _LOOKS_S if code == _KILLED else _LOOKS_S[:1] if code >= _SUSPICIOUS else ()
        for pause in looks:
            await asyncio.sleep(pause)
            if trouble := await in_thread(self._look):
                raise SandboxLost(trouble)
        return code

    async def start(self, argv: list[str], setting: Setting) -> None:
        """Start a command and let go of it; the engine reaps it.

        Raises:
            SandboxLost: the container or the engine is gone.
            Refused: the engine would not run it.
        """

        async def talk() -> None:
            client = await in_thread(self._engine)
            facts = await in_thread(self.facts)
            created = await in_thread(client.api.exec_create, facts.id, argv, stdout=False, stderr=False, **setting.options())
            await in_thread(client.api.exec_start, created["Id"], detach=True)

        await self._guard(talk(), None)

    def read_disk(self, remote_path: str, local_path: Path, max_bytes: int) -> None:
        """Copy one regular file out through the engine, which needs nothing to run in the container. Blocking.

        Raises:
            FileNotFoundError, EvidenceError, SandboxLost: see DockerSandbox.salvage.
        """
        facts = self.facts()
        try:
            chunks, _ = self._engine().api.get_archive(facts.id, remote_path, chunk_size=_DISK_CHUNK)
        except docker.errors.NotFound as error:
            raise FileNotFoundError(f"No {remote_path} in {facts.name}") from error
        except FAILURES as error:
            raise SandboxLost(f"The disk of {facts.name} could not be read: {error}.") from error
        try:
            with tarfile.open(fileobj=_Chunks(chunks), mode="r|", bufsize=_DISK_CHUNK) as tar:
                member = tar.next()
                file = tar.extractfile(member) if member is not None and member.isreg() else None
                if member is None or file is None or member.size > max_bytes:
                    raise EvidenceError(f"{remote_path} is no regular file of at most {max_bytes} bytes.", code="evidence-cap")
                local_path.unlink(missing_ok=True)
                with local_path.open("xb") as target:
                    shutil.copyfileobj(file, target, _DISK_CHUNK)
        except (tarfile.TarError, *FAILURES) as error:
            raise SandboxLost(f"The disk of {facts.name} could not be read: {error}.") from error

    def _engine(self) -> docker.DockerClient:
        return self._client if self._client is not None else shared_client()

    async def _guard(self, conversation: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """Wait for the conversation, the loss of the container, or the deadline, whichever comes first."""
        talk = asyncio.ensure_future(conversation)
        watch = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait({talk, watch}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if talk.done():
                with _translated():
                    return talk.result()
            if watch.done():
                raise SandboxLost(watch.result())
            raise TimeoutError
        finally:
            talk.cancel()
            watch.cancel()
            await asyncio.gather(talk, watch, return_exceptions=True)

    async def _watch(self) -> str:
        """Return what is wrong with the container, once something is."""
        while True:
            await asyncio.sleep(WATCH_S)
            now = time.monotonic()
            if self.known is not None and now - self._looked_at >= WATCH_S * 0.9:  # many execs share one look
                self._looked_at = now
                self._trouble = await in_thread(self._look)
            if self._trouble is not None:
                return self._trouble

    def _look(self) -> str | None:
        """Say what is wrong with the container; None while it runs. Blocking."""
        facts = self.facts()
        try:
            found = self._engine().api.containers(all=True, filters={"id": facts.id})
        except FAILURES as error:
            return f"The Docker engine does not answer: {error}."
        state = str(found[0]["State"]) if found else ""
        if state == "running":
            return None
        return f"The container {facts.name} {_STATES.get(state, f'is {state}') if found else 'was removed'}."

    async def _kill_now(self, exec_id: str) -> bool:
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(in_thread(self._kill, exec_id)), _KILL_WAIT_S)
        return False

    def _kill(self, exec_id: str) -> bool:
        """Kill an exec's process group from inside the container; True when that was done. Blocking.

        The engine tells the process's number on *its* machine. Only where that process is one of ours too (its cgroup
        names the container) can its number inside be read.
        """
        try:
            api = self._engine().api
            seen, look_until = api.exec_inspect(exec_id), time.monotonic() + _START_WAIT_S
            while not seen["Pid"] and seen["ExitCode"] is None and time.monotonic() < look_until:
                time.sleep(0.01)  # it is just being started, from another thread
                seen = api.exec_inspect(exec_id)
            pid, facts = seen["Pid"], self.facts()
            if not pid or facts.id not in Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii", errors="replace"):
                return False
            inside = _pid_inside(pid)
            if inside is None:
                return False
            killer = api.exec_create(facts.id, ["/bin/sh", "-c", f"kill -KILL -{inside}"], stdout=False, stderr=False, user="0")
            api.exec_start(killer["Id"], detach=True)
            give_up = time.monotonic() + _KILL_WAIT_S
            while _pid_inside(pid) == inside and time.monotonic() < give_up:
                time.sleep(0.01)  # a thread of ours; the engine itself reports such an exit two seconds late
            return _pid_inside(pid) != inside
        except (*FAILURES, SandboxLost):
            return False


class _Chunks(io.RawIOBase):
    """What the engine streams, as a file: the rest of it is never asked for."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """Give exactly `size` bytes, fewer only at the end."""
        parts = [self._rest]
        have = len(self._rest)
        while have < size and (chunk := next(self._chunks, b"")):
            parts.append(chunk)
            have += len(chunk)
        data = b"".join(parts)
        self._rest = data[size:]
        return data[:size]


async def _converse(client: docker.DockerClient, exec_id: str, stream: ExecStream, sink: Sink, feed: Feed | None) -> int:
    """Read a started exec to its end; waits for the process, and for the end of its output only a moment longer."""
    drained = asyncio.Event()

    async def read() -> None:
        try:
            async for which, chunk in stream.frames():
                sink(which, chunk)
        finally:
            drained.set()

    reader = asyncio.ensure_future(read())
    ended = asyncio.ensure_future(_exit_status(client, exec_id, drained))
    feeder = asyncio.ensure_future(feed(stream)) if feed is not None else None
    try:
        await asyncio.wait({reader, ended}, return_when=asyncio.FIRST_COMPLETED)
        if reader.done():
            reader.result()  # what the sink raised
        code = await ended
        await asyncio.wait({reader}, timeout=DRAIN_S)
        if reader.done():
            reader.result()
        return code
    finally:
        tasks = [task for task in (reader, ended, feeder) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _exit_status(client: docker.DockerClient, exec_id: str, drained: asyncio.Event) -> int:
    """Ask for the exit status: soon after the output ended, and now and then before, for a child may hold it open."""
    pause = _FIRST_ASK_S
    again = 0.01
    while True:
        if drained.is_set():
            await asyncio.sleep(again)
            again = min(again * 2, 0.5)
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(drained.wait(), pause)
            pause = min(pause * 2, _LAST_ASK_S)
        told = await in_thread(client.api.exec_inspect, exec_id)
        if not told["Running"] and told["ExitCode"] is not None:
            return int(told["ExitCode"])


def _pid_inside(pid: int) -> str | None:
    """Give the number that a process of this machine has in its own namespace; None when it is gone or a zombie."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^NSpid:.*?(\d+)$", status, re.MULTILINE)
    return found[1] if found and "\nState:\tZ" not in status else None


def _can_end_input(client: docker.DockerClient) -> bool:
    return client.api.base_url.startswith(("http://", "http+docker://localhost")) and os.name == "posix"


def _facts_from(listed: dict[str, Any]) -> Facts:
    return Facts(
        id=listed["Id"],
        name=(listed["Names"] or ["/" + listed["Id"][:12]])[0].removeprefix("/"),
        image=listed["Image"],
        host_network=listed["HostConfig"]["NetworkMode"] == "host",
    )


class _translated(contextlib.AbstractContextManager[None]):  # noqa: N801 - reads as a clause
    """Turn what the SDK raises into SandboxLost or Refused."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SandboxLost | TimeoutError) or not isinstance(error, FAILURES):
            return
        if isinstance(error, docker.errors.APIError):
            said = error.explanation or str(error)
            # 404: removed; 409: stopped, paused or restarting. The engine's other refusals are about the command.
            if error.status_code not in {404, 409}:
                raise Refused(f"The Docker engine refused: {said}") from error
            raise SandboxLost(f"The sandbox is lost: {said}.") from error
        if isinstance(error, requests.RequestException | docker.errors.DockerException | ConnectionError):
            raise SandboxLost(f"The Docker engine does not answer: {error}.") from error
