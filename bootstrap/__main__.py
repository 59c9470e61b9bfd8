# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The archive's verbs before an agent exists: check, install, clean. The prelude has read and checked the options.

It refuses to be called by people: its options are the prelude's, not those of `sh boxstrap.pyz`.
"""

from __future__ import annotations

import sys
from collections import defaultdict

from boxstrap.runner.wire import Answer, Code, ExitStatus, Failure, Installed, Report, to_json

# Each verb imports what it needs when it needs it: a warm start pays for every module, and needs three.
# ruff: noqa: PLC0415
_SWITCHES = {"--json", "--reuse", "--verify"}
UNHEALTHY = 3
"""Exit status between this and the prelude: the published runtime has to be repaired."""
_STATUS: dict[str, ExitStatus] = {
    Code.BUG: ExitStatus.BUG,
    Code.LIBC_TOO_OLD: ExitStatus.REFUSED,
    Code.LOCK_TIMEOUT: ExitStatus.TRY_AGAIN,
    Code.SESSION_CONFLICT: ExitStatus.TRY_AGAIN,
}


class Options:
    """The prelude's options: every one may come more than once."""

    def __init__(self, words: list[str]) -> None:
        self._values: dict[str, list[str]] = defaultdict(list)
        rest = iter(words)
        for word in rest:
            self._values[word].append("yes" if word in _SWITCHES else next(rest))

    def __getitem__(self, name: str) -> str:
        """Give the last value."""
        return self._values[name][-1]

    def get(self, name: str) -> str | None:
        """Give the last value, if there is one."""
        return self._values[name][-1] if self._values.get(name) else None

    def all(self, name: str) -> list[str]:
        """Give every value."""
        return self._values.get(name, [])

    def __contains__(self, name: str) -> bool:
        return name in self._values


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return the exit status (wire.ExitStatus)."""
    verb, *words = sys.argv[1:] if argv is None else argv
    options = Options(words)
    try:
        return int({"check": _check, "install": _install, "clean": _clean}[verb](options))
    except Exception as error:  # noqa: BLE001 - see below
        # Broad on purpose: --json promises one object, whatever our bug is.
        import traceback

        traceback.print_exc()
        failure = Failure(code=Code.BUG, message=f"{type(error).__name__}: {error}", remedy="Report this with the lines above.")
        return _say(options, failure)


def _check(options: Options) -> int:
    return _report(options, _finished(options))


def _finished(options: Options) -> Report:
    from boxstrap.bootstrap import preflight

    return preflight.finish(preflight.read_report(options["--report"]), urls=options.all("--url"))


def _install(options: Options) -> int:
    from boxstrap.bootstrap.steps import Clock

    clock = Clock(options["--marks"])
    if "--url" in options:
        report = _finished(options)
        if report.refused:
            return _report(options, report)
    if "--reuse" in options:
        from boxstrap.bootstrap.reuse import reuse

        found = reuse(options["--root"], options["--digest"], hashes="--verify" in options, clock=clock)
        return _say(options, found) if isinstance(found, Installed) else UNHEALTHY
    from boxstrap.bootstrap.install import Plan, install

    plan = Plan(
        root=options["--root"],
        digest=options["--digest"],
        pid=int(options["--pid"]),
        archive=options["--archive"],
        archive_sha256=options["--archive-sha256"],
        arch=options["--arch"],
        interpreter_sha256=options["--interpreter-sha256"],
        payload=options.get("--payload"),
        payload_sha256=options.get("--payload-sha256"),
        smoke=tuple(options.all("--smoke")),
    )
    return _say(options, install(plan, clock=clock))


def _clean(options: Options) -> int:
    from boxstrap.bootstrap.clean import clean

    return _say(options, clean(options["--root"], options["--sessions"]))


def _report(options: Options, report: Report) -> int:
    if "--json" in options:
        print(to_json(Answer(ok=not report.refused, report=report)))
    else:
        from boxstrap.bootstrap.preflight import table

        print(table(report))
        print("this box is refused" if report.refused else "this box will do")
    return ExitStatus.REFUSED if report.refused else ExitStatus.OK


def _say(options: Options, answer: Installed | Failure | list[str]) -> int:
    if isinstance(answer, Failure):
        if "--json" in options:
            print(to_json(Answer(ok=False, failure=answer)))
        else:
            print(f"boxstrap: {answer.code}: {answer.message} {answer.remedy}", file=sys.stderr)
        return _STATUS.get(answer.code, ExitStatus.INSTALL_FAILED)
    if "--json" in options:
        installed = answer if isinstance(answer, Installed) else None
        data: dict[str, object] | None = {"removed": answer} if isinstance(answer, list) else None
        print(to_json(Answer(ok=True, installed=installed, data=data)))
    elif isinstance(answer, Installed):
        took = ", ".join(f"{name} {seconds:.2f}" for name, seconds in answer.seconds.items())
        print(f"{answer.state} {answer.path}: {answer.files} files, {answer.bytes} bytes; seconds: {took}")
    else:
        print("\n".join(f"removed {path}" for path in answer) or "nothing to remove")
    return ExitStatus.OK
