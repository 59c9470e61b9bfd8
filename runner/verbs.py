# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The archive's verbs on a session: run, tail, status, stop, env, shell.

Each prints one JSON object with --json and a form for people without. It refuses to guess which session is meant.
"""

from __future__ import annotations

import argparse
import base64
import os
import subprocess
import sys
from dataclasses import asdict

from boxstrap.runner import environment, sessions
from boxstrap.runner.layout import RuntimePaths, SessionPaths
from boxstrap.runner.receipts import receipt_of
from boxstrap.runner.tail import follow, tail
from boxstrap.runner.told import told
from boxstrap.runner.wire import OUTCOME_EXIT, Answer, Code, ExitStatus, Failure, Receipt, outcome_of, to_json

_TRY_AGAIN = {Code.SESSION_CONFLICT, Code.LOCK_TIMEOUT}


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return the exit status (wire.ExitStatus)."""
    parser = _parser()
    options = parser.parse_args(argv)
    session = SessionPaths(os.path.abspath(options.session))
    verb = globals()[f"_{options.verb}"]
    return int(verb(options, session))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="boxstrap.pyz", description="Look after one session: one agent, one workdir, one activation.")
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=_Parser)
    for name, text in (
        ("run", "start the agent of a session folder that holds request.json; the same request again attaches"),
        ("tail", "print evidence from a byte offset on"),
        ("status", "say where a session stands"),
        ("stop", "stop a session, reap its processes, print its receipt"),
        ("env", "print the agent's exact environment"),
        ("shell", "open a shell in the agent's exact environment and workdir"),
    ):
        verb = verbs.add_parser(name, help=text, description=text)
        verb.add_argument("--session", required=True, metavar="DIR", help="the session's folder")
        verb.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
        if name == "run":
            how = verb.add_mutually_exclusive_group()
            how.add_argument("--wait", action="store_true", help="wait and exit with the outcome's status (the default)")
            how.add_argument("--hold", action="store_true", help="stay as the supervisor's parent; exit 0 at its end")
            how.add_argument("--detach", action="store_true", help="return as soon as it has started")
            how.add_argument("--prewarm", action="store_true", help="start what prewarm.json is enough for, and wait for `run`")
        elif name == "tail":
            verb.add_argument("--from", dest="start", type=int, default=0, metavar="N", help="byte offset (default 0)")
            verb.add_argument("--wait", type=float, default=0.0, metavar="S", help="seconds to wait for more (default 0)")
            verb.add_argument("--follow", type=float, default=0.0, metavar="S", help="go on for at most S seconds, to the end")
        elif name == "shell":
            verb.add_argument("argv", nargs="*", metavar="COMMAND", help="run this instead, after --")
        elif name == "stop":
            verb.add_argument("--wait", type=float, default=None, metavar="S", help="seconds to wait for the end")
            verb.add_argument("--remove", action="store_true", help="remove the session's folder afterwards")
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        self.print_usage(sys.stderr)
        print(f"boxstrap: {message}", file=sys.stderr)
        raise SystemExit(int(ExitStatus.USAGE))


def _say(options: argparse.Namespace, answer: dict[str, object] | Failure, status: int = 0) -> int:
    if isinstance(answer, Failure):
        if options.json:
            print(to_json(Answer(ok=False, failure=answer)))
        else:
            print(f"boxstrap: {answer.code}: {answer.message} {answer.remedy}", file=sys.stderr)
        return ExitStatus.TRY_AGAIN if answer.code in _TRY_AGAIN else ExitStatus.REFUSED
    if options.json:
        print(to_json(Answer(ok=True, data=answer)))
    else:
        print("\n".join(told(answer)))
    return status


def _run(options: argparse.Namespace, session: SessionPaths) -> int:
    home = os.path.dirname(os.path.dirname(os.path.dirname(sys.executable)))
    runtime = RuntimePaths(os.path.dirname(home), os.path.basename(home))
    if options.prewarm:
        return _say(options, sessions.prewarm(session, runtime))
    answer = sessions.launch(session, runtime, hold=not options.detach)
    receipt = receipt_of(session)
    if isinstance(answer, Failure) or receipt is None or options.detach or options.hold:
        return _say(options, answer)
    outcome = outcome_of(receipt)
    return _say(options, {**answer, "outcome": outcome.value, "receipt": asdict(receipt)}, OUTCOME_EXIT[outcome])


def _tail(options: argparse.Namespace, session: SessionPaths) -> int:
    if options.follow > 0:
        try:
            for reply in follow(session, start=max(0, options.start), bound_s=options.follow):
                sys.stdout.buffer.write(to_json(reply).encode() + b"\n" if options.json else base64.b64decode(reply.chunk))
                sys.stdout.buffer.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader has gone; what it did not get is asked for by offset
        return ExitStatus.OK
    reply = tail(session, start=max(0, options.start), wait_s=min(options.wait, 120.0))
    if options.json:
        print(to_json(reply))
        return ExitStatus.OK
    sys.stdout.buffer.write(base64.b64decode(reply.chunk))
    print(f"boxstrap: next offset {reply.next} of {reply.size}, state {reply.state}", file=sys.stderr)
    return ExitStatus.OK


def _status(options: argparse.Namespace, session: SessionPaths) -> int:
    answer = sessions.status(session)
    receipt = receipt_of(session)
    if isinstance(answer, dict) and receipt is not None:
        answer = {"state": answer["state"], "outcome": outcome_of(receipt).value, **answer}
    return _say(options, answer)


def _stop(options: argparse.Namespace, session: SessionPaths) -> int:
    stopped = sessions.stop(session, wait_s=options.wait)
    if isinstance(stopped, Receipt):
        outcome = outcome_of(stopped).value
        answer: dict[str, object] | Failure = {"state": "ended", "outcome": outcome, "receipt": asdict(stopped)}
    else:
        answer = stopped
    running = isinstance(answer, dict) and answer["state"] == "running"
    if options.remove and not running:
        removed = sessions.remove(session)
        answer = removed if removed is not None else answer
    return _say(options, answer, ExitStatus.TRY_AGAIN if running else ExitStatus.OK)


def _agent_env(session: SessionPaths) -> tuple[dict[str, str], str] | Failure:
    """Give what the agent was started with, or would be by this very exec, and its workdir."""
    read = sessions.read_request(session)
    if isinstance(read, Failure):
        return read
    saved = environment.saved(session)
    if saved is not None:
        return saved, read[0].workdir
    try:
        task = environment.task_environment(environment.initial(), read[0].activation)
    except ValueError as error:
        return Failure(code=Code.LAUNCH_FAILED, message=f"{error}.", remedy="Correct the activation snippet.")
    environment.prepare_home(task, read[0], session)
    return environment.agent_environment(task, read[0], session), read[0].workdir


def _env(options: argparse.Namespace, session: SessionPaths) -> int:
    made = _agent_env(session)
    if isinstance(made, Failure):
        return _say(options, made)
    env = {
        name.encode("utf-8", "replace").decode(): value.encode("utf-8", "replace").decode() for name, value in made[0].items()
    }
    if options.json:
        return _say(options, {"env": env})
    sys.stdout.writelines(f"{name}={value}\n" for name, value in sorted(env.items()))
    return ExitStatus.OK


def _shell(options: argparse.Namespace, session: SessionPaths) -> int:
    made = _agent_env(session)
    if isinstance(made, Failure):
        return _say(options, made)
    env, workdir = made
    env.pop(environment.MARKER)  # a person's shell is not the session's to kill
    return subprocess.call(options.argv or ["bash", "--norc", "--noprofile", "-i"], env=env, cwd=workdir)
