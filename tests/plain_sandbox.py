# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A sandbox that can do no more than the protocol asks: nothing is held open, streamed or detached.

It wraps a real one. It refuses to pass on any capability beyond the three calls.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from boxstrap.controller.sandbox import ExecResult, Sandbox
from boxstrap.runner.layout import default_runtime_root, default_session_root


class Plain:
    """A sandbox with the protocol's three calls and nothing more."""

    def __init__(self, inner: Sandbox) -> None:
        self._inner = inner

    def roots(self, agent: str) -> tuple[str, str]:
        """Give the inner one's, where it has some."""
        roots = getattr(self._inner, "roots", None)
        return roots(agent) if roots else (default_runtime_root(agent), default_session_root(agent))

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 180,
        user: str | int | None = None,
    ) -> ExecResult:
        """Pass on."""
        return await self._inner.exec(command, cwd=cwd, env=env, timeout_s=timeout_s, user=user)

    async def upload(self, local_path: str | os.PathLike[str], remote_path: str) -> None:
        """Pass on."""
        await self._inner.upload(local_path, remote_path)

    async def download(self, remote_path: str, local_path: str | os.PathLike[str]) -> None:
        """Pass on."""
        await self._inner.download(remote_path, local_path)
