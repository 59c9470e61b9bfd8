# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Gets a pinned runtime into the box: looks, checks, pushes only what is missing, installs, and takes its push folder away.

It refuses to push anything large into a box that a check has refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import secrets
import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from boxstrap.controller import artifacts, programs
from boxstrap.controller.cancelling import carry_through
from boxstrap.controller.errors import BoxstrapError, InstallError, PreflightError, SandboxLost, SetupFailed
from boxstrap.controller.interpreter_sources import arch_of
from boxstrap.controller.phases import Phases
from boxstrap.controller.sandbox import ExecResult, Sandbox
from boxstrap.runner.layout import DIGEST_CHARS, RuntimePaths, push_folder
from boxstrap.runner.wire import Answer, Installed, Report

PROVIDER_FAILED = 125
SPACE_MARGIN_MIB = 64
KILLED_BOUND_S = 5
"""Seconds that a killed installer's lock is waited for; after that it lives, or another does."""
PROBE = "BOXSTRAP_PROBE"
"""The variable that names the folder which prelude.sh tries out writing in, wherever it does."""
ELSEWHERE = frozenset({"/var/tmp", "/tmp", "/dev/shm"})  # noqa: S108
"""Where prelude.sh looks, besides the roots and HOME, for a folder to propose."""

_ANSWER = TypeAdapter(Answer)
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Want:
    """What should be in the box: an agent's runtime, and where."""

    agent: str
    variant: str
    runtime_root: str
    session_root: str
    workdir: str
    urls: Sequence[str] = ()
    loopback_ok: bool = False
    interpreter: Path | None = None
    program: programs.Program | None = None
    user: str | int | None = None


async def run(sandbox: Sandbox, command: str, *, user: str | int | None = None, timeout_s: float = 180) -> ExecResult:
    """Run a command in the box.

    Raises:
        SandboxLost: the provider failed; foreign exceptions of the provider are mapped here and nowhere else.
    """
    result = await foreign(sandbox.exec(command, timeout_s=timeout_s, user=user))
    if result.return_code == PROVIDER_FAILED and result.error_type:
        raise SandboxLost(
            f"The sandbox did not run a command: {result.error_type}: {(result.stderr or '').strip()[:300]}",
            remedy="Check that it still runs.",
            code={"timeout": "sandbox-timeout", "exec_failed": "sandbox-refused"}.get(result.error_type),
        )
    return result


async def foreign(call: Awaitable[_Result], *, files: bool = False) -> _Result:
    """Await a sandbox's call and turn whatever its provider raises into SandboxLost.

    With `files`, an OSError is passed on, unless it is a connection's: a file that cannot be had is not taken for a sandbox
    that does not answer.
    """
    try:
        return await call
    except (BoxstrapError, FileNotFoundError):
        raise
    except Exception as error:
        # Broad on purpose: a provider may raise anything; for us it means that the sandbox does not answer.
        if files and isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
            raise
        raise SandboxLost(
            f"The sandbox failed: {type(error).__name__}: {str(error)[:300]}", remedy="Check that it runs."
        ) from error


def answer_of(result: ExecResult, verb: str) -> Answer:
    """Read the one JSON object of a verb.

    Raises:
        SetupFailed: there is none (the text says what came instead).
    """
    line = (result.stdout or "").strip()
    try:
        return _ANSWER.validate_json(line)
    except ValidationError as error:
        said = ((result.stderr or "") + line).strip()[-400:]
        raise SetupFailed(
            f"`{verb}` gave no answer in the box: exit status {result.return_code}, text {said!r}.",
            remedy="Run the archive by hand in the box: sh boxstrap.pyz check.",
            code="missing-tool" if result.return_code in {126, 127} else None,
        ) from error


async def ensure_runtime(sandbox: Sandbox, want: Want, phases: Phases) -> tuple[RuntimePaths, Installed]:
    """Make sure that the runtime is published in the box, with as little as possible pushed.

    Raises:
        PreflightError: the box is refused; it was left as it was found.
        InstallError: the runtime could not be published.
        ArtifactError: the host could not build what has to be pushed.
        SandboxLost: the sandbox does not answer.
    """
    with phases.step("probe"):
        machine, present = await _probe(sandbox, want)
    arch = arch_of(machine)
    arch = arch if arch in artifacts.ARCHITECTURES else "x86_64"  # the check refuses any other, and says so
    with phases.step("artifacts"):
        archive, interpreter, payload = await asyncio.to_thread(_artifacts, want, arch, phases.note)
    runtime = RuntimePaths(want.runtime_root, artifacts.runtime_digest(interpreter, payload, archive))
    flags = _install_flags(want, runtime, interpreter, payload)
    if runtime.digest[:DIGEST_CHARS] in present:
        with phases.step("reuse"):
            answer = answer_of(await _verb(sandbox, want, runtime.archive, ["install", *flags], runtime), "install")
            if answer.installed is not None:
                return runtime, answer.installed
            _raise_refusal(answer, only_report=True)
    folder = push_folder(want.session_root, secrets.token_hex(8))
    remote = {path: posixpath.join(folder, path.name) for path in _paths(archive, interpreter, payload)}
    pushed = remote[archive.path]
    try:
        with phases.step("push archive"):
            if want.user is not None:  # uploads are made by the sandbox's own user: the folders have to be this one's
                await run(sandbox, f"mkdir -p {shlex.quote(folder)}", user=want.user)
            await foreign(sandbox.upload(archive.path, pushed))
        with phases.step("check"):
            words = ["check", *_check_flags(want, interpreter, payload)]
            _raise_refusal(answer_of(await _verb(sandbox, want, pushed, words, runtime), "check"))
        with phases.step("push runtime"):
            await asyncio.gather(
                *(foreign(sandbox.upload(path, there)) for path, there in remote.items() if path != archive.path)
            )
        flags += ["--interpreter", remote[interpreter.path]]
        flags += ["--payload", remote[payload.path]] if payload else []
        with phases.step("install"):
            answer = answer_of(await _verb(sandbox, want, pushed, ["install", *flags], runtime), "install")
            _raise_refusal(answer)
    finally:
        await carry_through(_remove(sandbox, want, folder))
    if answer.installed is None:
        raise SetupFailed("`install` answered without saying what it installed.", remedy="This is a bug of boxstrap.")
    return runtime, answer.installed


def _artifacts(
    want: Want, arch: str, report: Callable[[str], None]
) -> tuple[artifacts.Archive, artifacts.Interpreter, artifacts.Payload | None]:
    interpreter = artifacts.interpreter(arch=arch, source=want.interpreter, report=report)
    payload = artifacts.payload(want.agent, variant=want.variant, interpreter=interpreter, program=want.program, report=report)
    return artifacts.archive(report=report), interpreter, payload


def _paths(archive: artifacts.Archive, interpreter: artifacts.Interpreter, payload: artifacts.Payload | None) -> list[Path]:
    return [archive.path, interpreter.path, *([payload.path] if payload else [])]


async def _probe(sandbox: Sandbox, want: Want) -> tuple[str, set[str]]:
    """Ask for the machine and the published runtimes; works with no more than a POSIX shell."""
    root = shlex.quote(want.runtime_root)
    script = f'uname -m 2>/dev/null || echo unknown; for m in {root}/*/manifest.json; do [ -f "$m" ] && echo "$m"; done; :'
    result = await run(sandbox, script, user=want.user)
    if result.return_code != 0:
        raise SetupFailed(
            f"The box ran no shell (exit status {result.return_code}, text {(result.stderr or result.stdout or '')[-200:]!r}), "
            "needed a POSIX /bin/sh.",
            remedy="Use an image that has one.",
            code="missing-tool",
        )
    machine, *manifests = (result.stdout or "unknown").split("\n")
    return machine.strip(), {posixpath.basename(posixpath.dirname(line)) for line in manifests if line}


async def _verb(sandbox: Sandbox, want: Want, archive: str, words: Sequence[str], runtime: RuntimePaths) -> ExecResult:
    """Run `check` or `install`, and take away what it leaves if it is killed: whoever waits no longer may have done that."""
    token = secrets.token_hex(8)
    command = f"{PROBE}={token} {shlex.join(['sh', archive, words[0], '--json', *words[1:]])}"
    try:
        return await run(sandbox, command, user=want.user)
    except BaseException:
        await carry_through(_sweep(sandbox, want, runtime, token))
        raise


async def _sweep(sandbox: Sandbox, want: Want, runtime: RuntimePaths, token: str) -> None:
    """Take away the probe of one check, and the stages of a runtime: who holds its lock knows that nobody alive has one.

    Another installer is not disturbed. A lost sandbox has nothing to tidy.
    """
    folders = {str(folder) for root in (want.runtime_root, want.session_root) for folder in PurePosixPath(root, "_").parents}
    probes = shlex.join(f"{folder.rstrip('/')}/.boxstrap-probe-{token}" for folder in sorted(folders | ELSEWHERE))
    command = f"""rm -rf {probes} "${{HOME-}}/.boxstrap-probe-{token}"
for stage in {shlex.quote(runtime.stages)}*; do
    [ ! -d "$stage" ] || flock -w {KILLED_BOUND_S} {shlex.quote(runtime.lock)} rm -rf "$stage"
done
:"""
    with contextlib.suppress(SandboxLost):
        await run(sandbox, command, user=want.user)


def _check_flags(want: Want, interpreter: artifacts.Interpreter, payload: artifacts.Payload | None) -> list[str]:
    need = (interpreter.unpacked_bytes + (payload.unpacked_bytes if payload else 0)) // 2**20 + SPACE_MARGIN_MIB
    flags = ["--agent", want.agent, "--runtime-root", want.runtime_root, "--session-root", want.session_root]
    flags += ["--workdir", want.workdir, "--glibc-floor", _floor(interpreter, payload), "--need-mib", str(need)]
    for url in want.urls:
        flags += ["--url", url]
    return flags + (["--loopback-ok"] if want.loopback_ok else [])


def _floor(interpreter: artifacts.Interpreter, payload: artifacts.Payload | None) -> str:
    floors = [interpreter.glibc_floor, *([payload.glibc_floor] if payload and payload.glibc_floor else [])]
    return max(floors, key=lambda floor: tuple(int(part) for part in floor.split(".")))


def _install_flags(
    want: Want, runtime: RuntimePaths, interpreter: artifacts.Interpreter, payload: artifacts.Payload | None
) -> list[str]:
    flags = [*_check_flags(want, interpreter, payload), "--digest", runtime.digest, "--interpreter-sha256", interpreter.sha256]
    if payload is not None:
        flags += ["--payload-sha256", payload.sha256]
        for module in payload.smoke:
            flags += ["--smoke", module]
    return flags


def _raise_refusal(answer: Answer, *, only_report: bool = False) -> None:
    if answer.report is not None and answer.report.refused:
        raise PreflightError(answer.report, text=report_text(answer.report))
    if answer.failure is not None and not only_report:
        raise InstallError(answer.failure)


def report_text(report: Report) -> str:
    """Write a report as people read it: what failed first, one line a check."""
    facts = ", ".join(f"{name} {value}" for name, value in sorted(report.facts.items()) if value)
    lines = [f"The box is {'refused' if report.refused else 'fine'} ({facts})."]
    lines += [
        f"  {check.status}  {check.code}: found {check.found}, needed {check.needed}. {check.remedy}"
        for status in ("fail", "warn")
        for check in report.checks
        if check.status == status
    ]
    return "\n".join(lines)


async def _remove(sandbox: Sandbox, want: Want, folder: str) -> None:
    """Take the push folder away, and the session root if nothing else is in it. A lost sandbox has nothing to tidy."""
    with contextlib.suppress(SandboxLost):
        command = f"rm -rf {shlex.quote(folder)}; rmdir {shlex.quote(want.session_root)} 2>/dev/null; :"
        await run(sandbox, command, user=want.user)
