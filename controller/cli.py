# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The `boxstrap` command: the host side for people.

It refuses to own a sandbox that it was not asked to make: only --image creates a container, and removes it again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from boxstrap.controller import artifacts, payloads, programs, tools
from boxstrap.controller.activation import PRESETS
from boxstrap.controller.budgets import Budgets
from boxstrap.controller.errors import BoxstrapError, SandboxLost, SetupFailed, UsageError
from boxstrap.controller.sandbox import Sandbox
from boxstrap.controller.sandboxes.docker import DockerSandbox, own_container
from boxstrap.controller.sandboxes.local import LocalSandbox
from boxstrap.controller.session import open_session
from boxstrap.controller.show import Progress, show_result
from boxstrap.controller.sink import Sink
from boxstrap.controller.spec import RELAY, Result, SessionSpec
from boxstrap.runner.wire import OUTCOME_EXIT, ExitStatus, Model, Outcome

AGENTS = sorted({agent for agent, _ in payloads.RECIPES} | payloads.by_lock() | payloads.NEEDS_NONE | programs.known())

_EXITS = {UsageError: ExitStatus.USAGE, SetupFailed: ExitStatus.REFUSED, SandboxLost: ExitStatus.TRY_AGAIN}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status: the outcome's (wire.OUTCOME_EXIT), or wire.ExitStatus."""
    console = Console(highlight=False, markup=False)
    errors = Console(stderr=True, highlight=False, markup=False)
    options = _parser().parse_args(argv)
    try:
        return int(options.call(options, console))
    except BoxstrapError as error:
        errors.print(f"boxstrap: {error.code}: {error}", soft_wrap=True)
        known = (status for kind, status in _EXITS.items() if isinstance(error, kind))
        return next(known, ExitStatus.INSTALL_FAILED)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="boxstrap", description="Run a pinned coding agent in a sandbox that somebody else made.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    run = commands.add_parser("run", help="open a session in a sandbox, run the agent, collect, close")
    run.set_defaults(call=_run)
    where = run.add_mutually_exclusive_group(required=True)
    where.add_argument("--docker", metavar="NAME", help="a running container, by name or id")
    where.add_argument("--image", help="make a container from this image, and remove it at the end")
    where.add_argument("--local", metavar="DIR", type=Path, help="this machine, with every root inside this folder")
    run.add_argument("--agent", required=True, choices=AGENTS)
    run.add_argument("--workdir", required=True, help="the task's repo in the sandbox")
    run.add_argument("--prompt-file", required=True, type=Path, metavar="F")
    run.add_argument("--model-url", metavar="URL", help="as the sandbox sees it, up to and with /v1")
    run.add_argument(
        "--max-policy-calls", type=int, metavar="N", help="model calls that the agent may make (default: no limit)"
    )
    run.add_argument("--relay", action="store_true", help="this host calls the model: the box needs no network and no key")
    run.add_argument("--model-name", default="model", metavar="NAME")
    run.add_argument("--model-api", choices=("responses", "chat"), help="default: responses for nooa, chat for others")
    run.add_argument("--model-header", action="append", default=[], metavar="NAME=VALUE")
    run.add_argument("--model-timeout", type=float, default=600.0, metavar="S", help="seconds for one model call")
    run.add_argument("--session", metavar="ID", help="the same id and --out attach after a restart (default: random)")
    run.add_argument("--out", type=Path, metavar="DIR", help="evidence and result go here (default: out/<session>)")
    run.add_argument("--deadline", type=float, metavar="S", help="seconds that the agent may take")
    run.add_argument("--payload", default="lean", choices=("lean", "full"))
    run.add_argument("--runtime-root", default="", metavar="DIR", help="instead of /opt/nemo-gym-<agent>")
    run.add_argument("--session-root", default="", metavar="DIR", help="instead of the folder under the temporary folder")
    run.add_argument("--interpreter", type=Path, metavar="PATH", help="pack this Python instead of one that is found")
    run.add_argument(
        "--activation", default="", metavar="BASH", help=f"a snippet that makes the task's environment, or {', '.join(PRESETS)}"
    )
    run.add_argument(
        "--option", action="append", default=[], metavar="NAME=JSON", help="an option of the agent: see its module"
    )
    run.add_argument("--tools", type=Path, metavar="FILE", help="JSON: a list of tool servers (wire.ToolAccess) to grant")
    run.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="added to the agent's environment")
    run.add_argument("--user", help="run as this user of the box")
    run.add_argument("--network", help="with --image: the container's network")
    run.add_argument(
        "--push", metavar="URL", help="where the box reaches this host, http://HOST:PORT: it pushes its evidence there"
    )
    run.add_argument("--keep", action="store_true", help="leave the session's folder in the box: README, Why did it fail?")
    run.add_argument("--loopback-ok", action="store_true", help="a loopback model URL means the box's own")
    run.add_argument("--allow-credentials", action="store_true", help="the box may have what looks like a provider's key")
    run.add_argument("argv", nargs="*", help="agent command: the program and its arguments, after --")
    _add_program(run)
    build = commands.add_parser("build", help="build the archive and, with --agent, what its runtime needs")
    build.set_defaults(call=_build)
    build.add_argument("--agent", choices=AGENTS)
    build.add_argument("--payload", default="lean", choices=("lean", "full"))
    build.add_argument("--arch", default="x86_64", choices=("x86_64", "aarch64"))
    convert = commands.add_parser("convert", help="print a session's evidence in the shape of others, as JSON")
    convert.set_defaults(call=_convert)
    convert.add_argument("--to", required=True, choices=("responses", "observations", "atif"), help="NeMo Gym's, or Harbor's")
    convert.add_argument("folder", type=Path, metavar="OUT_DIR", help="what --out of the run was")
    _add_program(build)
    return parser


def _add_program(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--program", default="", metavar="FILE|URL", help="agents that are programs: which one")
    parser.add_argument("--program-sha256", default="", metavar="HEX", help="what it must hash to; a URL needs it")
    parser.add_argument("--accept-eula", action="store_true", help="you have read and accept the program's licence")


def _program(options: argparse.Namespace) -> programs.Program:
    return programs.Program(source=options.program, sha256=options.program_sha256, accept_eula=options.accept_eula)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}.", remedy=f"See {self.prog} --help.")


def _pairs(items: list[str]) -> dict[str, str]:
    for item in items:
        if "=" not in item:
            raise UsageError(f"Found {item!r}, needed NAME=VALUE.", remedy="Write it with an equals sign.")
    return dict(item.split("=", 1) for item in items)


def _agent_options(items: list[str]) -> dict[str, object]:
    found = {}
    for name, text in _pairs(items).items():
        try:
            found[name] = json.loads(text)
        except ValueError as error:
            raise UsageError(f"--option {name}: found {text!r}, needed JSON ({error}).", remedy="Quote texts.") from error
    return found


def _spec(options: argparse.Namespace, session_id: str) -> SessionSpec:
    model = None
    if options.model_url:
        model = Model(
            url=options.model_url,
            name=options.model_name,
            api=options.model_api or ("responses" if options.agent == "nooa" else "chat"),
            headers=_pairs(options.model_header),
            timeout_s=options.model_timeout,
        )
    elif options.agent != "command":
        raise UsageError(f"Agent {options.agent} found no model, needed one.", remedy="Give --model-url.")
    budgets = Budgets() if options.deadline is None else Budgets().with_worker(options.deadline)
    return SessionSpec(
        session_id=session_id,
        agent=options.agent,
        workdir=options.workdir,
        out=options.out or Path("out") / session_id,
        model=model,
        upstream=RELAY if options.relay else "direct",
        max_policy_calls=options.max_policy_calls,
        variant=options.payload,
        runtime_root=options.runtime_root,
        session_root=options.session_root,
        interpreter=options.interpreter,
        program=_program(options),
        budgets=budgets,
        keep=options.keep,
        prewarm=False,  # the prompt is here
        loopback_ok=options.loopback_ok,
        allow_credentials=options.allow_credentials,
        user=options.user,
        activation=options.activation,
        env=_pairs(options.env),
        argv=options.argv,
        options=_agent_options(options.option),
        tool_accesses=tools.read_accesses(options.tools) if options.tools else [],
    )


@contextlib.contextmanager
def _sandbox(options: argparse.Namespace) -> Iterator[Sandbox]:
    if options.docker:
        yield DockerSandbox(options.docker, user=options.user)
    elif options.local:
        yield LocalSandbox(options.local)
    else:
        with own_container(options.image, network=options.network) as container:
            yield DockerSandbox(container, user=options.user)


def _run(options: argparse.Namespace, console: Console) -> int:
    try:
        prompt = options.prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{options.prompt_file}: {error}, needed a UTF-8 text file.", remedy="Check --prompt-file.") from error
    session_id = options.session or f"{options.agent}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    spec = _spec(options, session_id)
    progress = Progress(console)
    progress.line("session", session_id)
    with _sandbox(options) as sandbox:
        result = asyncio.run(_session(sandbox, spec, prompt, progress, push_to=options.push))
    if result is None:
        return OUTCOME_EXIT[Outcome.CANCELLED]
    show_result(console, result)
    return OUTCOME_EXIT[result.outcome]


async def _session(
    sandbox: Sandbox, spec: SessionSpec, prompt: str, progress: Progress, *, push_to: str | None
) -> Result | None:
    """Run one session; Ctrl-C or TERM stops the agent, collects, closes, and says so."""
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        if task is not None and not interrupted:
            interrupted = True
            progress.line("interrupted", "stopping the agent and collecting; the sandbox stays")
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    session = None
    try:
        async with (
            _sink(push_to) as sink,
            open_session(
                sandbox, spec, sink=sink, on_event=progress.event, on_phase=progress.phase, on_note=progress.note
            ) as session,
        ):
            state = session.installed.state if session.installed else "unknown"
            progress.line("runtime", f"{state} at {session.runtime.path if session.runtime else ''}")
            return await session.invoke(spec.request(prompt))
    except asyncio.CancelledError:
        if not interrupted:
            raise
        return session.result if session is not None else None


@contextlib.asynccontextmanager
async def _sink(url: str | None) -> AsyncIterator[Sink | None]:
    if url is None:
        yield None
        return
    from boxstrap.controller.listening import listening  # noqa: PLC0415 (a run that pulls needs no server)

    async with listening(url) as sink:
        yield sink


def _convert(options: argparse.Namespace, console: Console) -> int:
    from boxstrap.controller.convert import TARGETS, story_in  # noqa: PLC0415 (a run needs none of it)

    console.print_json(data=TARGETS[options.to](story_in(options.folder)), ensure_ascii=True)
    return ExitStatus.OK


def _build(options: argparse.Namespace, console: Console) -> int:
    def report(text: str) -> None:
        console.print(text, soft_wrap=True)

    archive = artifacts.archive()
    report(f"archive      {archive.path.stat().st_size:>11,} bytes  sha256 {archive.sha256[:16]}  {archive.path}")
    if options.agent:
        interpreter = artifacts.interpreter(arch=options.arch, report=report)
        report(
            f"interpreter  {interpreter.path.stat().st_size:>11,} bytes  CPython {interpreter.version} {interpreter.arch}, "
            f"needs glibc {interpreter.glibc_floor}"
        )
        payload = artifacts.payload(
            options.agent, variant=options.payload, interpreter=interpreter, program=_program(options), report=report
        )
        if payload is not None:
            report(f"payload      {payload.path.stat().st_size:>11,} bytes  {payload.agent} {payload.variant} {payload.arch}")
    return ExitStatus.OK


if __name__ == "__main__":
    sys.exit(main())
