# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Finishes the report that the prelude began: the URLs that it could not try, and the table that people read.

A check that fails is a value. It refuses to judge by names: a connection is made, with a bound.
"""

from __future__ import annotations

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from urllib.parse import urlsplit

from boxstrap.runner.wire import Check, Code, Report

CONNECT_WITHIN_S = 5.0


def read_report(text: str) -> Report:
    """Read the prelude's report.

    Raises:
        ValueError: it is none; that is our bug.
    """
    try:
        plain = json.loads(text)
        return Report(**{**plain, "checks": [Check(**check) for check in plain["checks"]]})
    except (TypeError, KeyError) as error:
        raise ValueError(f"not a report: {error}") from error


def finish(report: Report, *, urls: list[str]) -> Report:
    """Try the URLs that the prelude left over, and judge again."""
    if not urls:
        return report
    with ThreadPoolExecutor(max_workers=8) as pool:
        tried = list(pool.map(reach, urls))
    kept = [check for check in report.checks if (check.code, check.status) != (Code.URL_UNREACHABLE, "skip")]
    checks = kept + tried
    return replace(report, checks=checks, refused=any(check.status == "fail" for check in checks))


def reach(url: str) -> Check:
    """Connect to a URL's host and port within five seconds; nothing is sent."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    where = f"{parts.hostname} port {port}"
    needed = f"{url} can be reached"
    try:
        socket.create_connection((parts.hostname or "", port), timeout=CONNECT_WITHIN_S).close()
    except OSError as error:
        # The agent may go through a proxy where a socket cannot.
        status = "warn" if _has_proxy(parts.scheme) else "fail"
        found = f"{where}: {error.strerror or error}"
        remedy = (
            "Check the address, and that the sandbox has a network that leads there; without one, let the controller relay."
        )
        return Check(code=Code.URL_UNREACHABLE, status=status, found=found, needed=needed, remedy=remedy)
    return Check(code=Code.URL_UNREACHABLE, status="ok", found=f"{where} answers", needed=needed, remedy="")


def _has_proxy(scheme: str) -> bool:
    # Not getproxies(): importing urllib.request takes longer than all else here.
    return any(os.environ.get(name) for name in (f"{scheme}_proxy", f"{scheme}_proxy".upper()))


def table(report: Report) -> str:
    """Print the report for people: one line a check, two more where something is to be done."""
    lines = []
    for check in report.checks:
        lines.append(f"{check.status:5} {check.code:17} {check.found}")
        if check.status in {"fail", "warn"}:
            lines += [f"      needed: {check.needed}", f"      {check.remedy}"]
    return os.linesep.join(lines)
