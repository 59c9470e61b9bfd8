# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Tool servers that the controller calls for a box: each with its lock, and its cookies, kept on disk.

It refuses to let the box choose anything but a function that it was granted and that function's arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from pathlib import Path

from boxstrap.runner.frames import TOOL
from boxstrap.runner.wire import ToolAccess


@dataclass
class _Jar:
    cookies: dict[str, str]
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ToolServer:
    """One granted function, as it is called."""

    def __init__(self, access: ToolAccess, name: str, jar: _Jar, jars: ToolJars) -> None:
        self.access = access
        self.url = f"{access.base_url.rstrip('/')}/{name}"
        self.lock = jar.lock
        self._jar, self._jars = jar, jars

    def headers(self) -> dict[str, str]:
        """Return the headers of a call: the grant's, and its cookies."""
        jar = "; ".join(f"{key}={value}" for key, value in self._jar.cookies.items())
        return {"content-type": "application/json", **self.access.headers, **({"cookie": jar} if jar else {})}

    def keep(self, lines: Sequence[str]) -> None:
        """Take the cookies of an answer (its Set-Cookie lines)."""
        for line in lines:
            told: SimpleCookie = SimpleCookie()
            with contextlib.suppress(CookieError):
                told.load(line)
            for key, morsel in told.items():
                if morsel["max-age"] == "0":
                    self._jar.cookies.pop(key, None)
                else:
                    self._jar.cookies[key] = morsel.value
        if lines:
            self._jars.save()


class ToolJars:
    """All functions of a session, and the cookies of their servers, kept in a file of the session's folder on the host."""

    def __init__(self, accesses: Sequence[ToolAccess], path: Path) -> None:
        self._path = path
        known = self._load()
        self._jars = {access.name: _Jar(known.get(access.name, dict(access.cookies))) for access in accesses}
        self._servers = {
            f"{TOOL}{access.name}/{tool['name']}": ToolServer(access, str(tool["name"]), self._jars[access.name], self)
            for access in accesses
            for tool in access.tools
        }

    def server_of(self, dialect: str) -> ToolServer | None:
        """Return the function that a request out of the box names; None when it was not granted."""
        return self._servers.get(dialect)

    def cookies(self) -> dict[str, str]:
        """Return the cookies of all servers, a later grant's where two have one name: NeMo Gym has a single jar."""
        return {key: value for jar in self._jars.values() for key, value in jar.cookies.items()}

    def save(self) -> None:
        """Write the jars, for a controller that comes after this one."""
        part = self._path.with_name(f".{self._path.name}.part")
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump({name: jar.cookies for name, jar in self._jars.items()}, file)
        part.replace(self._path)

    def _load(self) -> dict[str, dict[str, str]]:
        try:
            told: dict[str, dict[str, str]] = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        return told
