# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Functions of other servers that a session may call: from NeMo Gym's grants, checked, probed, and their cookies at the end.

Gym grants a server (DirectHTTPToolAccess) and names the functions elsewhere, in the request's `tools`; here each server has its
own. It refuses a grant that the agent could not use, before anything is installed.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from boxstrap.controller import push
from boxstrap.controller.errors import EvidenceError, SandboxLost, SetupFailed, UsageError
from boxstrap.controller.phases import Phases
from boxstrap.controller.sandbox import Sandbox
from boxstrap.runner.wire import ToolAccess

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
COOKIES_MAX = 64 * 1024
"""Bytes of cookies that a session may bring back."""
PROBE_S = 10.0
_ACCESSES = TypeAdapter(list[ToolAccess])
AGENTS = {"nooa"}
"""Agents that can be given functions."""


def accesses_of(grants: Iterable[Mapping[str, object]], tools: Sequence[Mapping[str, object]]) -> list[ToolAccess]:
    """Make accesses of NeMo Gym's `tool_accesses` and the `tools` of its Responses request.

    Raises:
        UsageError: a required grant is of another kind, or more than one server could be meant by the tools.
    """
    usable: list[Mapping[str, object]] = []
    for grant in grants:
        if grant.get("kind", "direct_http") == "direct_http":
            usable.append(grant)
        elif grant.get("required") is not False:
            raise UsageError(
                f"Found the required tool access {grant.get('name')!r} of kind {grant.get('kind')!r}, needed direct_http.",
                remedy="Let the resources server offer direct_http, or do not require it.",
            )
    if tools and len(usable) != 1:
        raise UsageError(
            f"Found {len(tools)} tools and {len(usable)} servers, needed one: a request's tools do not say whose they are.",
            remedy="Make a ToolAccess for each server, with its own tools.",
        )
    fields = ("name", "base_url", "required", "cookies", "headers")
    try:
        made = [
            ToolAccess(**{key: grant[key] for key in fields if key in grant}, tools=[dict(tool) for tool in tools])  # type: ignore[arg-type]
            for grant in usable
        ]
    except TypeError as error:
        raise UsageError(f"A tool access lacks what it needs: {error}.", remedy="Give it a name and a base_url.") from error
    check(made)
    return made


def read_accesses(path: Path) -> list[ToolAccess]:
    """Read a file that holds a JSON list of accesses.

    Raises:
        UsageError: it holds something else.
    """
    try:
        return _ACCESSES.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UsageError(f"{path}: {error}, needed a JSON list of tool accesses.", remedy="See runner/wire.py.") from error


def check(accesses: Sequence[ToolAccess], *, agent: str = "nooa") -> None:
    """Refuse accesses that cannot work.

    Raises:
        UsageError: with what was found.
    """
    if accesses and agent not in AGENTS:
        raise UsageError(
            f"Agent {agent} was given functions, which it cannot call.", remedy=f"Use {', '.join(sorted(AGENTS))}."
        )
    names = [access.name for access in accesses]
    if len(names) != len(set(names)):
        raise UsageError(f"Found tool accesses {names}, needed a name for each.", remedy="Rename one.")
    taken: set[object] = set()
    for access in accesses:
        parts = urlsplit(str(access.base_url))
        if not NAME.fullmatch(access.name) or access.kind != "direct_http" or parts.scheme not in {"http", "https"}:
            raise UsageError(
                f"Found tool access {access.name!r} ({access.kind}) at {access.base_url!r}, needed name, direct_http and URL.",
                remedy="See runner/wire.py, ToolAccess.",
            )
        for tool in access.tools:
            if tool.get("type") != "function" or not str(tool.get("name")).isidentifier() or str(tool["name"]).startswith("_"):
                raise UsageError(
                    f"{access.name} offers {tool.get('name')!r} ({tool.get('type')!r}), needed functions with public names.",
                    remedy="Leave it out, or rename it.",
                )
            if tool["name"] in taken:
                raise UsageError(f"Found two functions named {tool['name']!r}, needed one.", remedy="Leave one out.")
            taken.add(tool["name"])


def origins(accesses: Sequence[ToolAccess], *, required: bool) -> list[str]:
    """Return where the required, or the optional, servers are: scheme, host and port."""
    return [
        f"{urlsplit(access.base_url).scheme}://{urlsplit(access.base_url).netloc}"
        for access in accesses
        if access.required is required
    ]


async def probe_optional(
    sandbox: Sandbox, archive: str, want: push.Want, accesses: Sequence[ToolAccess], phases: Phases
) -> None:
    """Say which optional servers the box cannot reach; the required ones are part of the box's check."""
    for url in origins(accesses, required=False):
        words = ["sh", archive, "check", "--json", "--url", url, *(["--loopback-ok"] if want.loopback_ok else [])]
        report = push.answer_of(await push.run(sandbox, shlex.join(words), user=want.user), "check").report
        for problem in report.checks if report else []:
            if problem.code.startswith("url-") and problem.status == "fail":
                phases.note(f"an optional tool server cannot be reached: {problem.found}")


def in_the_box(accesses: Sequence[ToolAccess]) -> list[ToolAccess]:
    """Return what a box is told of servers that the controller calls for it: their functions, and neither place nor secrets."""
    return [replace(access, base_url=f"http://{access.name}.invalid", headers={}, cookies={}) for access in accesses]


async def probe_from_here(accesses: Sequence[ToolAccess], phases: Phases) -> None:
    """Say which servers this host cannot reach, when it is to call them for the box.

    Raises:
        SetupFailed: a required one.
    """
    for access in accesses:
        parts = urlsplit(access.base_url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        try:
            async with asyncio.timeout(PROBE_S):
                _, writer = await asyncio.open_connection(parts.hostname, port)
            writer.close()
        except OSError as error:  # a timeout is one
            text = f"The tool server {access.name} ({parts.hostname} port {port}) cannot be reached from this host: {error}."
            if access.required:
                raise SetupFailed(text, remedy="Start it, or do not require it.", code="url-unreachable") from error
            phases.note(text)


async def final_cookies(
    sandbox: Sandbox, path: str, accesses: Sequence[ToolAccess], *, user: str | int | None
) -> dict[str, str]:
    """Return the cookies of all servers as the session left them; those it was given, where it left none that can be read.

    Where two servers have a cookie of one name, the later grant's counts: NeMo Gym has a single jar.
    """
    jars: dict[str, dict[str, str]] = {access.name: dict(access.cookies) for access in accesses}
    command = f"if test -f {shlex.quote(path)}; then head -c {COOKIES_MAX + 1} {shlex.quote(path)}; fi"
    try:
        said = (await push.run(sandbox, command, user=user)).stdout or ""
        told = json.loads(said) if 0 < len(said) <= COOKIES_MAX else {}
    except (SandboxLost, EvidenceError, ValueError):
        told = {}
    for name, jar in told.items() if isinstance(told, dict) else ():
        if name in jars and isinstance(jar, dict) and all(_is_cookie(key, value) for key, value in jar.items()):
            jars[name] = jar
    return {key: value for jar in jars.values() for key, value in jar.items()}


def _is_cookie(name: object, value: object) -> bool:
    """Tell whether a header may hold it (RFC 6265): the sandbox wrote it, and a server will be sent it."""
    return (
        isinstance(name, str)
        and isinstance(value, str)
        and re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) is not None
        and re.fullmatch(r"[\x20-\x2b\x2d-\x3a\x3c-\x7e]*", value) is not None
    )
