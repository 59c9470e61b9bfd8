# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The sandbox, as the controller sees it: three calls, the shape of NeMo Gym's AsyncSandbox.

A sandbox is owned by Resources. This module has no way to create, stop or destroy one, on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from os import PathLike
from typing import Protocol, runtime_checkable


class ExecResult(Protocol):
    """What an exec came to. A provider's own failure is return code 125 with an `error_type`, not an exception."""

    @property
    def stdout(self) -> str | None:
        """Standard output as text; what is not UTF-8 is replaced."""

    @property
    def stderr(self) -> str | None:
        """Standard error as text."""

    @property
    def return_code(self) -> int:
        """The command's exit status; 125 with `error_type` set when the provider failed."""

    @property
    def error_type(self) -> str | None:
        """None, or the provider's word for its failure: "timeout", "sandbox_lost", …."""


class Conversation(Protocol):
    """A command that runs, and its standard streams."""

    async def send(self, data: bytes) -> None:
        """Write to its standard input.

        Raises:
            OSError: nobody reads it any more.
        """

    async def receive(self) -> bytes:
        """Give what it printed next; nothing at its end."""


@runtime_checkable
class Conversing(Protocol):
    """A sandbox that can also hold a command's standard streams open both ways. Optional: see follower.py and relay.py."""

    def converse(self, command: str, *, user: str | int | None = None) -> AbstractAsyncContextManager[Conversation]:
        """Start a POSIX shell command; leaving the context lets go of it.

        Raises:
            BoxstrapError, OSError: it could not be started.
        """


@runtime_checkable
class Sandbox(Protocol):
    """Anything that can run a command and copy a file both ways."""

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 180,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a POSIX shell command; never raises for what happens inside the sandbox."""
        ...

    async def upload(self, local_path: str | PathLike[str], remote_path: str) -> None:
        """Copy one host file in; parent folders are made.

        Raises:
            Exception: the provider's own; the controller maps it to SandboxLost or PushError in one place.
        """
        ...

    async def download(self, remote_path: str, local_path: str | PathLike[str]) -> None:
        """Copy one sandbox file out.

        Raises:
            FileNotFoundError: it is not there.
        """
        ...
