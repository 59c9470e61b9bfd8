# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""This machine as a sandbox, for trying things out and for tests that need no engine.

Commands run as the current user in an environment built from nothing, with HOME inside the given folder. That keeps
the two environments apart; it is no isolation, and says so in its name. It refuses to write a file outside its folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import stat
import subprocess
import threading
from collections.abc import AsyncIterator, Mapping
from os import PathLike
from pathlib import Path

from boxstrap.controller.errors import EvidenceError, UsageError
from boxstrap.controller.sandboxes.output import DOWNLOAD_MAX, DRAIN_S, BoundedText, Output, failed
from boxstrap.controller.sandboxes.talk import Talk
from boxstrap.runner.layout import default_runtime_root, default_session_root

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CHUNK = 256 * 1024


class LocalSandbox:
    """A folder of this machine. Implements `boxstrap.controller.sandbox.Sandbox`.

    Each exec is a session of its own. One that times out or is cancelled has its process group killed; a process that
    made another session goes on. A background child that holds the output open delays an exec by half a second.
    """

    shares_host_network = True

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.folder = Path(folder).resolve()
        self._home = self.folder / "home"
        self._home.mkdir(parents=True, exist_ok=True)

    def __repr__(self) -> str:
        """Name the folder."""
        return f"LocalSandbox({str(self.folder)!r})"

    def describe(self) -> str:
        """Say for a person what this is."""
        return f"this machine, in {self.folder}"

    def roots(self, agent: str) -> tuple[str, str]:
        """Give the runtime root and the session root that an agent has here: the usual ones, inside the folder."""
        return f"{self.folder}{default_runtime_root(agent)}", f"{self.folder}{default_session_root(agent)}"

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = 180,
        user: str | int | None = None,
    ) -> Output:
        """Run `/bin/sh -c command` in `cwd` (default: the folder); `env` adds to PATH, HOME and LANG.

        Return code 125 with `error_type`: "timeout", or "exec_failed" (no such folder).

        Raises:
            UsageError: another user was asked for.
        """
        self._refuse_other(user)
        out, err = _Pipe(), _Pipe()
        process = None
        try:
            try:
                process = await asyncio.create_subprocess_exec(
                    "/bin/sh",
                    "-c",
                    command,
                    cwd=cwd or self.folder,
                    env=self._environment(env),
                    stdin=subprocess.DEVNULL,
                    stdout=out.write_end,
                    stderr=err.write_end,
                    start_new_session=True,
                )
            except OSError as error:
                return failed("exec_failed", f"/bin/sh could not be started: {error}.")
            finally:
                out.parent_only()
                err.parent_only()
            try:
                async with asyncio.timeout(timeout_s):
                    code = await process.wait()
            except TimeoutError:
                message = f"The command did not end within {timeout_s:g} s. It was killed."
                return failed("timeout", message, stdout=out.text(), stderr=err.text())
            drained = asyncio.gather(out.ended.wait(), err.ended.wait())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(drained, DRAIN_S)
            return Output(stdout=out.text(), stderr=err.text(), return_code=code if code >= 0 else 128 - code)
        finally:
            if process is not None and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await asyncio.shield(process.wait())
            out.close()
            err.close()

    @contextlib.asynccontextmanager
    async def converse(self, command: str, *, user: str | int | None = None) -> AsyncIterator[Talk]:
        """Run `/bin/sh -c command` with its standard streams open both ways; leaving kills it.

        Raises:
            OSError: it could not be started.
            UsageError: another user was asked for.
        """
        self._refuse_other(user)
        talk = Talk()
        process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", command),
            cwd=self.folder,
            env=self._environment(None),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None  # noqa: S101 (they are pipes)
        assert stdout is not None  # noqa: S101

        async def send(data: bytes) -> None:
            stdin.write(data)
            await stdin.drain()

        async def read() -> None:
            try:
                while chunk := await stdout.read(_CHUNK):
                    talk.feed(chunk)
            finally:
                talk.end()

        talk.sender = send
        reading = asyncio.ensure_future(read())
        try:
            yield talk
        finally:
            reading.cancel()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            await asyncio.gather(reading, process.wait(), return_exceptions=True)

    async def spawn(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
    ) -> None:
        """Start `/bin/sh -c command` in a session of its own and let go of it; a thread of ours reaps it.

        Raises:
            OSError: it could not be started (no such folder).
            UsageError: another user was asked for.
        """
        self._refuse_other(user)
        process = await asyncio.to_thread(
            subprocess.Popen,
            ["/bin/sh", "-c", command],
            cwd=cwd or self.folder,
            env=self._environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        threading.Thread(target=process.wait, name=f"boxstrap-reap-{process.pid}", daemon=True).start()

    async def upload(self, local_path: str | PathLike[str], remote_path: str) -> None:
        """Copy one file into the folder, mode 0644; parent folders are made.

        Raises:
            UsageError: the target is not inside the folder.
            OSError: it could not be written.
        """
        await asyncio.to_thread(self._take_in, Path(local_path), remote_path)

    async def download(self, remote_path: str, local_path: str | PathLike[str], *, max_bytes: int = DOWNLOAD_MAX) -> None:
        """Copy one file out; `local_path` appears when it is complete.

        Raises:
            FileNotFoundError: it is not there.
            EvidenceError: it is larger than `max_bytes`.
            OSError: it is no regular file, or could not be read.
        """
        await asyncio.to_thread(_copy, Path(remote_path), Path(local_path), None, max_bytes)

    def _take_in(self, source: Path, remote_path: str) -> None:
        target = Path(remote_path).resolve()
        if not target.is_relative_to(self.folder):
            raise UsageError(f"Found {remote_path}, needed a path inside {self.folder}.", remedy="Use roots() of this sandbox.")
        _copy(source, target, 0o644, DOWNLOAD_MAX)

    def _environment(self, env: Mapping[str, str] | None) -> dict[str, str]:
        return {"PATH": _PATH, "HOME": str(self._home), "LANG": "C.UTF-8", **(env or {})}

    def _refuse_other(self, user: str | int | None) -> None:
        if user is not None and str(user) != str(os.getuid()):
            raise UsageError(
                f"Found user {user!r}, needed none: a local sandbox runs as the current user ({os.getuid()}).",
                remedy="Leave the user out, or use a container.",
            )


class _Pipe:
    """A pipe whose read end is emptied by the event loop, so that the wait is for the process and not for end of file."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._kept = BoundedText()
        self.ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._read_end, self._take)

    def _take(self) -> None:
        try:
            chunk = os.read(self._read_end, _CHUNK)
        except BlockingIOError:
            return
        if chunk:
            self._kept.add(chunk)
        else:
            asyncio.get_running_loop().remove_reader(self._read_end)
            self.ended.set()

    def parent_only(self) -> None:
        """Close the write end; the child has its own."""
        os.close(self.write_end)

    def text(self) -> str:
        """Decode what came so far."""
        return self._kept.text()

    def close(self) -> None:
        """Stop reading."""
        asyncio.get_running_loop().remove_reader(self._read_end)
        os.close(self._read_end)


def _copy(source: Path, target: Path, mode: int | None, max_bytes: int) -> None:
    """Copy a regular file; the target appears under its name when it is complete."""
    with open(source, "rb", opener=_open_without_waiting) as reader:
        found = os.fstat(reader.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{source} is no regular file")
        if found.st_size > max_bytes:
            raise EvidenceError(
                f"{source} holds {found.st_size} bytes, more than the {max_bytes} that may come out of a sandbox."
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
        try:
            with partial.open("xb") as writer:
                shutil.copyfileobj(reader, writer, _CHUNK)
                if mode is not None:
                    os.fchmod(writer.fileno(), mode)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # a fifo would wait for its writer
