# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A sandbox of NeMo Gym's shape whose provider answers with bare tuples, None for empty, and errors of its own."""

from __future__ import annotations

from pathlib import Path

from boxstrap.controller.sandboxes.local import LocalSandbox


class ProviderError(RuntimeError):
    """What this provider raises, whatever went wrong."""


class TupleProvider:
    """Runs commands on this machine, and answers in the least helpful way that the contract allows."""

    def __init__(self, local: LocalSandbox) -> None:
        self._local = local

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: int | float | None = 180,
        user: str | int | None = None,
    ) -> tuple[str | None, str | None, int, str | None]:
        """Run a command."""
        assert env is None or type(env) is dict, "NeMo Gym declares a dict"
        result = await self._local.exec(command, cwd=cwd, env=env, timeout_s=timeout_s, user=user)
        return result.stdout or None, result.stderr or None, result.return_code, result.error_type

    async def upload(self, local_path: Path | str, remote_path: str) -> None:
        """Copy one file in."""
        await self._local.upload(Path(local_path), remote_path)

    async def download(self, remote_path: str, local_path: Path | str) -> None:
        """Copy one file out."""
        try:
            await self._local.download(remote_path, Path(local_path))
        except OSError as error:
            raise ProviderError("download failed") from error
