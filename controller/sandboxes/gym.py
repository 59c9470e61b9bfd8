# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""NeMo Gym's AsyncSandbox as a sandbox: the same three calls, with bounds and one shape of answer.

An AsyncSandbox can be passed to the controller as it is. This adapter adds what its providers differ in: an answer that
is an object, a tuple or a dict, output without an end, a call that never returns, a missing file under any exception.
It imports nothing of NeMo Gym, and refuses to start or stop the sandbox.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from boxstrap.controller.errors import EvidenceError
from boxstrap.controller.sandboxes.output import (
    DOWNLOAD_MAX,
    TRANSFER_TIMEOUT_S,
    Output,
    bounded,
    failed,
)

_GRACE_S = 30.0
"""Seconds that a provider has, after the command's own timeout, to say that it timed out."""
_MISSING, _NOT_A_FILE = 44, 45
_FIELDS = ("stdout", "stderr", "return_code", "error_type")


class AsyncSandbox(Protocol):
    """What is used of NeMo Gym's class; the providers' answers differ, so they are judged when they come."""

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: int | float | None = 180,
        user: str | int | None = None,
    ) -> Any:
        """Run a command."""

    async def upload(self, local_path: Path | str, remote_path: str) -> None:
        """Copy one file in."""

    async def download(self, remote_path: str, local_path: Path | str) -> None:
        """Copy one file out."""


class GymSandbox:
    """A started AsyncSandbox. Implements `boxstrap.controller.sandbox.Sandbox`.

    What happens to a command that times out is the provider's affair; Gym's docker provider leaves it running.
    """

    def __init__(
        self,
        async_sandbox: AsyncSandbox,
        *,
        shares_host_network: bool = False,
        transfer_timeout_s: float = TRANSFER_TIMEOUT_S,
    ) -> None:
        self._inner = async_sandbox
        self.shares_host_network = shares_host_network
        self._transfer_timeout_s = transfer_timeout_s

    def __repr__(self) -> str:
        """Name what is adapted."""
        return f"GymSandbox({self._inner!r})"

    def describe(self) -> str:
        """Say for a person what this is."""
        return f"NeMo Gym sandbox ({type(self._inner).__name__})"

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = 180,
        user: str | int | None = None,
    ) -> Output:
        """Run a command; what the provider raises becomes return code 125 with `error_type` "sandbox_lost"."""
        bound = None if timeout_s is None else timeout_s + _GRACE_S
        try:
            async with asyncio.timeout(bound):
                answer = await self._inner.exec(
                    command, cwd=cwd, env=None if env is None else dict(env), timeout_s=timeout_s, user=user
                )
        except TimeoutError as error:
            return failed(
                "timeout", f"The provider did not answer within the command's {timeout_s} s and {_GRACE_S:g} s more. {error}"
            )
        except Exception as error:  # noqa: BLE001
            # Broad on purpose: a provider may raise anything of its own; each means that it could not run the command.
            return failed("sandbox_lost", f"The sandbox failed: {type(error).__name__}: {bounded(str(error), limit=4096)}")
        return _output(answer)

    async def upload(self, local_path: str | PathLike[str], remote_path: str) -> None:
        """Copy one host file in; the owner and the mode are the provider's.

        Raises:
            TimeoutError: it took longer than `transfer_timeout_s`.
            Exception: the provider's own.
        """
        async with asyncio.timeout(self._transfer_timeout_s):
            await self._inner.upload(Path(local_path), remote_path)

    async def download(self, remote_path: str, local_path: str | PathLike[str], *, max_bytes: int = DOWNLOAD_MAX) -> None:
        """Copy one sandbox file out, if the sandbox says that it is at most `max_bytes` long.

        Raises:
            FileNotFoundError: it is not there.
            EvidenceError: it is larger.
            OSError: it is no regular file.
            TimeoutError: it took longer than `transfer_timeout_s`.
            Exception: the provider's own.
        """
        path = shlex.quote(remote_path)
        asked = await self.exec(f"[ -e {path} ] || exit {_MISSING}; [ -f {path} ] || exit {_NOT_A_FILE}; wc -c <{path}")
        if asked.return_code == _MISSING:
            raise FileNotFoundError(f"No {remote_path} in {self.describe()}")
        if asked.return_code == _NOT_A_FILE:
            raise OSError(f"{remote_path} in {self.describe()} is no regular file")
        size = asked.stdout.strip()
        if size.isdecimal() and int(size) > max_bytes:
            raise EvidenceError(f"{remote_path} holds {size} bytes, more than the {max_bytes} that may come out of a sandbox.")
        target = Path(local_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        async with asyncio.timeout(self._transfer_timeout_s):
            await self._inner.download(remote_path, target)


def _output(answer: Any) -> Output:
    """Read a provider's answer, whichever of the three shapes it has."""
    if isinstance(answer, Mapping):
        values = [answer.get(name) for name in _FIELDS]
    elif isinstance(answer, tuple | list):
        values = [*answer, *[None] * len(_FIELDS)][: len(_FIELDS)]
    else:
        values = [getattr(answer, name, None) for name in _FIELDS]
    stdout, stderr, code, error_type = values
    if not isinstance(code, int):
        return failed(
            "sandbox_error", f"The provider gave {code!r} as the return code, needed a number.", stdout=bounded(stdout)
        )
    # Some providers' error types are enums; their value is the word.
    word = None if error_type is None else str(getattr(error_type, "value", error_type))
    return Output(stdout=bounded(stdout), stderr=bounded(stderr), return_code=code, error_type=word)
