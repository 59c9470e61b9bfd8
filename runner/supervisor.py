# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The parent of the agent: starts it, pumps its output, keeps the deadline, reaps everything, writes the receipt.

It waits on the process, never on the end of a stream: a grandchild may hold stdout open for ever. It refuses to call a
session ended while one of its processes is left.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from boxstrap.runner import agents, cgroups, environment, finish, processes, receipts, warm
from boxstrap.runner.evidence import EvidenceLog, plain
from boxstrap.runner.gateway_process import GatewayProcess
from boxstrap.runner.layout import RuntimePaths, SessionPaths
from boxstrap.runner.pump import Pump
from boxstrap.runner.wire import Kind, Model, Outcome, Receipt, Request, Survivor, session_brand

HEARTBEAT_S = 15.0
TICK_S = 0.25
LEFTOVER_GRACE_S = 2.0
"""Between TERM and KILL for children that a finished agent left behind."""
DRAIN_BOUND_S = 2.0


class Supervisor:
    """One run of one agent, from launch to receipt. Without a digest it waits for its request: `request` is a prewarm then."""

    def __init__(
        self,
        request: Request,
        digest: str,
        session: SessionPaths,
        runtime: RuntimePaths,
        environ: Mapping[str, str],
        *,
        introduce: Callable[[str], None],
        tell: int = -1,
    ) -> None:
        self._introduce = introduce
        self._tell = tell
        self._request = request
        self._digest = digest
        self._session = session
        self._runtime = runtime
        self._environ = environ
        self._log: EvidenceLog
        self._selector = selectors.DefaultSelector()
        self._agent_pid = 0
        self._agent_status: int | None = None
        self._status, self._detail = "", ""
        self._result: object = None
        self._reason = ""
        self._stopping = False
        self._unusable = False
        self._reaped, self._cpu, self._peak = 0, 0.0, 0
        self._parser: agents.Parser | None = None
        self._gateway: GatewayProcess | None = None
        self._agent: agents.Agent | None = None
        self._env: dict[str, str] = {}
        self._prepared_s = 0.0
        self._argv: list[str] = []
        self._pumps: list[Pump] = []
        self._go = -1

    def run(self) -> Receipt | None:
        """Run the agent to its end and return the receipt that was written; None when no request came."""
        self._wake_on_signals()
        if not self._digest and not self._warm_up():
            return None
        self._log = EvidenceLog(self._session.evidence, self._session.artifacts)
        oom_before = cgroups.oom_kills()
        started = time.time()
        survivors: list[Survivor] = []
        try:
            self._start()
        except (ValueError, OSError) as error:
            self._status, self._detail = Outcome.SETUP_FAILED.value, str(error)
            self._log.append(Kind.LOG, {"stream": "boxstrap", "text": f"the agent was not started: {plain(str(error))}"})
        else:
            survivors = self._watch()
            self._drain()
        survivors += self._finish_gateway()
        return self._end(started, survivors, oom_killed=cgroups.oom_kills() > oom_before)

    def _wake_on_signals(self) -> None:
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_term)
        for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
            signal.signal(ignored, lambda *_: None)  # not SIG_IGN: the agent would inherit that, and be deaf to it
        for number in signal.valid_signals() - {signal.SIGXFSZ}:  # that one is CPython's own, and Popen gives it back
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)  # whoever started us in the background was deaf to it: nohup, a shell's &
        self._wake_reader, self._wake_writer = reader, writer
        self._selector.register(reader, selectors.EVENT_READ, None)

    def _on_term(self, *_: object) -> None:
        self._stopping = True

    def _warm_up(self) -> bool:
        """Start what needs no prompt, and take the request that comes; False when none does: then nothing is left running."""
        taken = None
        with contextlib.suppress(ValueError, OSError):  # whoever launches comes to the same, and says so
            if getattr(self._prepare(), "WAITS", False):
                self._spawn(waits=True)
            taken = warm.claimed(self._session, self._request, self._called_off)
        if taken is None or not self._stands():
            finish.kill_all(finish.below_this)
            return False
        self._request, self._digest = taken
        self._introduce(self._digest)
        with contextlib.suppress(OSError):  # the watchdog was killed, and nobody hears it
            os.write(self._tell, receipts.RUNS)
        if self._go >= 0:
            with contextlib.suppress(OSError):  # it has ended meanwhile, and what that means is judged as ever
                os.write(self._go, environment.GO)
            os.close(self._go)
        return True

    def _stands(self) -> bool:
        """Whether what was started early still runs: what became of it before its request is nobody's failure."""
        started = (self._agent_pid, self._gateway.pid if self._gateway is not None else 0)
        found = [processes.read(pid) for pid in started if pid]
        return not any(process is None or process.dead for process in found)

    def _called_off(self, wait_s: float) -> bool:
        select.select([self._wake_reader], [], [], wait_s)
        while self._take_wakeups():
            continue
        return self._stopping or os.path.lexists(self._session.stop)

    def _start(self) -> None:
        """Make the environment and launch the agent, unless that was done before, and say so.

        Raises:
            ValueError: the request's options or its activation snippet do not work.
            OSError: the program or the workdir cannot be used.
        """
        request = self._request
        if self._agent is None:
            self._prepare()
        if request.model is not None:
            self._log.append(Kind.LOG, {"stream": "boxstrap", "text": _patience(request.model)})
        self._log.append(Kind.PHASE, {"name": "environment", "seconds": self._prepared_s})
        if not self._agent_pid:
            self._spawn()
        self._log.append(
            Kind.AGENT_STARTED,
            {"agent": request.agent, "pid": self._agent_pid, "argv": plain(self._argv), "workdir": plain(request.workdir)},
        )
        for pump in self._pumps:
            self._selector.register(pump.fd, selectors.EVENT_READ, pump)
        if self._gateway is not None:
            self._gateway.on_begin = self._take_now

    def _prepare(self) -> agents.Agent:
        """Make the environment, and start the gateway."""
        request, session = self._request, self._session
        begun = time.monotonic()
        agent = agents.get(request.agent)
        task = environment.task_environment(self._environ, request.activation)
        environment.prepare_home(task, request, session)
        self._env = environment.agent_environment(task, request, session)
        if request.model is not None:
            self._gateway = GatewayProcess(request, request.model, session, task, self._append)
            self._selector.register(self._gateway.pump.fd, selectors.EVENT_READ, self._gateway.pump)
        self._prepared_s = round(time.monotonic() - begun, 4)
        self._agent = agent
        return agent

    def _append(self, kind: Kind, data: Mapping[str, object]) -> None:
        self._log.append(kind, data)

    def _spawn(self, *, waits: bool = False) -> None:
        """Launch the agent and wire its pipes. One that waits does so at its standard input."""
        assert self._agent is not None  # noqa: S101 (prepared before)
        request, session, env = self._request, self._session, dict(self._env)
        if self._gateway is not None:
            request = replace(request, model=self._gateway.model)
        launch = self._agent.launch(request, session, self._runtime)
        env |= launch.env
        environment.save(session, env)
        if launch.interpreter:
            environment.hide_loader_variables(env)
        out, out_child = os.pipe()
        err, err_child = os.pipe()
        events, events_child = os.pipe()
        self._parser = launch.parser
        by_fd = launch.parser is None
        if by_fd:
            env[environment.EVENTS_FD] = str(events_child)
            env[environment.SESSION_DIR] = session.path
        stdin = -1
        try:
            if waits:
                stdin, self._go = os.pipe()
                env[environment.WAITS] = "1"
            else:
                stdin = os.open(launch.stdin, os.O_RDONLY)
            child = subprocess.Popen(
                launch.argv,
                cwd=request.workdir,
                env=env,
                stdin=stdin,
                stdout=out_child,
                stderr=err_child,
                pass_fds=(events_child,) if by_fd else (),
                start_new_session=True,
            )
        except OSError:
            for fd in (out, err, events):
                os.close(fd)
            raise
        finally:
            for fd in (out_child, err_child, events_child, *([stdin] if stdin >= 0 else [])):
                os.close(fd)
        self._agent_pid = child.pid
        child.returncode = 0  # this loop reaps it; Popen must not try
        self._argv = launch.argv
        self._pumps = [
            Pump(out, path=session.agent_out, on_line=None if by_fd else self._on_stdout),
            Pump(err, path=session.agent_err, on_line=None),
            Pump(events, path=None, on_line=self._on_event if by_fd else None),
        ]

    def _take_now(self) -> None:
        """Read what the agent's pipes hold at this moment; their end is left to the loop."""
        for pump in self._pumps:
            if pump.open:
                pump.read()

    def _watch(self) -> list[Survivor]:
        """Pump and wait until the last process is gone; return those that would not go."""
        request = self._request
        begun = beaten = time.monotonic()
        deadline = begun + request.deadline_s
        kill_at = give_up_at = 0.0
        clean = 0
        while True:
            self._pump_once(finish.SCAN_EVERY_S if self._reason else min(TICK_S, max(0.0, deadline - time.monotonic())))
            self._reap()
            now = time.monotonic()
            if not self._reason:
                self._reason = self._why_end(now, deadline)
                if not self._reason:
                    if now - beaten >= HEARTBEAT_S:
                        beaten = now
                        self._beat()
                    self._log.sync(every_s=1.0)
                    continue
                if self._gateway is not None:
                    self._gateway.state.ending = self._reason != "exited"
                grace = min(LEFTOVER_GRACE_S, request.grace_s) if self._reason == "exited" else request.grace_s
                kill_at, give_up_at = now + grace, now + grace + finish.KILL_BOUND_S
                self._signal_all(signal.SIGTERM)
            found = self._find()
            clean = 0 if found else clean + 1
            if clean == 2:
                self._reap()
                return []
            if now >= give_up_at and found:
                return finish.named(found)
            if now >= kill_at:
                processes.kill(self._find)

    def _why_end(self, now: float, deadline: float) -> str:
        if self._agent_status is not None:
            return "exited"
        if self._unusable:
            return "unusable"
        if now >= deadline:  # before a stop: whoever stops what is overdue does not cancel it
            return "deadline"
        if self._stopping or os.path.lexists(self._session.stop):
            return "stopped"
        exhausted_at = self._gateway.exhausted_at if self._gateway is not None else 0.0
        if exhausted_at and now - exhausted_at >= self._request.grace_s:
            return "budget"
        return ""

    def _pump_once(self, wait_s: float) -> None:
        calls = self._gateway.pump if self._gateway is not None else None
        # The gateway's events first: what the agent did with an answer comes after the call that gave it.
        for key, _ in sorted(self._selector.select(wait_s), key=lambda ready: ready[0].data is not calls):
            if key.data is None:
                while self._take_wakeups():
                    continue
                continue
            pump: Pump = key.data
            while pump.read() and pump is calls:
                continue
            if not pump.open:
                self._selector.unregister(pump.fd)

    def _take_wakeups(self) -> bool:
        try:
            return bool(self._wake_reader.recv(4096))
        except BlockingIOError:
            return False

    def _drain(self) -> None:
        """Take what the pipes still hold. Bounded: a survivor may go on writing."""
        bound = time.monotonic() + DRAIN_BOUND_S
        for pump in self._pumps:
            while pump.open and pump.read() and time.monotonic() < bound:
                continue

    def _finish_gateway(self) -> list[Survivor]:
        """Take the last events of the gateway and see it gone; return it if it would not go."""
        gateway = self._gateway
        if gateway is None:
            return []
        if gateway.pump.open:
            self._selector.unregister(gateway.pump.fd)
        gateway.finish()
        bound = time.monotonic() + DRAIN_BOUND_S
        while gateway.pid and time.monotonic() < bound:
            self._pump_once(finish.SCAN_EVERY_S)
            self._reap()
        return [Survivor(pid=gateway.pid, name="gateway")] if gateway.pid else []

    def _judge_calls(self, code: int | None) -> None:
        """Let the model calls overrule what the agent said of its end."""
        if self._gateway is None:
            return
        verdict = self._gateway.state.verdict(self._status, reason=self._reason, by_itself=code is not None)
        if verdict is not None and verdict[0] != self._status:
            self._status, self._detail = verdict

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._gateway is not None and pid == self._gateway.pid:
                self._gateway.reaped(usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime)
                continue
            self._reaped += 1
            self._cpu += usage.ru_utime + usage.ru_stime
            self._peak = max(self._peak, usage.ru_maxrss * 1024)
            if pid == self._agent_pid:
                self._agent_status = status

    def _find(self) -> list[processes.Process]:
        found = finish.left_of(self._session, below=(os.getpid(),))
        gateway = self._gateway.pid if self._gateway is not None else 0  # it serves until the last other process is gone
        return [process for process in found if process.pid != gateway]

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._find():
            processes.send(process, number)

    def _beat(self) -> None:
        found = self._find()
        self._log.append(Kind.HEARTBEAT, {"processes": len(found), "cpu_seconds": round(self._cpu, 3)})

    def _on_stdout(self, line: bytes) -> None:
        assert self._parser is not None  # noqa: S101 (nobody else is given lines)
        try:
            self._record(self._parser.feed(line))
        except agents.UnusableError as error:
            self._unusable = True
            self._status, self._detail = Outcome.SETUP_FAILED.value, str(plain(str(error)))[:4096]
        except Exception as error:  # noqa: BLE001
            # Broad on purpose: the line is the agent's, and no line may end its supervisor.
            self._log.append(Kind.LOG, {"stream": "stdout", "text": line[:65536].decode("utf-8", "replace")})
            self._log.append(Kind.GAP, {"code": "unreadable_event", "bytes": len(line), "detail": type(error).__name__})

    def _record(self, events: Iterable[agents.Event]) -> None:
        for kind, data in events:
            self._log.append(kind, {str(plain(str(key))): plain(value) for key, value in data.items()})

    def _finish_parser(self, exit_code: int | None) -> None:
        """Let the parser say its last. What it said before by UnusableError stands."""
        if self._parser is None or not self._agent_pid:
            return
        try:
            end = self._parser.finish(exit_code)
            self._record(end.events)
        except Exception as error:  # noqa: BLE001
            # Broad on purpose: what it parsed is the agent's, and the receipt is written whatever that was.
            self._log.append(Kind.GAP, {"code": "unreadable_event", "detail": type(error).__name__})
        else:
            if end.outcome is not None and not self._unusable:
                self._status, self._detail = end.outcome.value, str(plain(end.detail))[:4096]

    def _on_event(self, line: bytes) -> None:
        """Stamp one line of an instrumented agent. What is not an event is kept as a log and a gap."""
        try:
            said = json.loads(line)
            name, data = said["kind"], dict(said["data"])
            kind = None if name == "result" else Kind(name)
        except (ValueError, TypeError, KeyError, RecursionError):
            self._log.append(Kind.LOG, {"stream": "events", "text": line[:65536].decode("utf-8", "replace")})
            self._log.append(Kind.GAP, {"code": "unknown_event", "bytes": len(line)})
            return
        if kind is None:
            self._status, self._detail = (
                str(plain(str(data.get("status", ""))))[:64],
                str(plain(str(data.get("detail", ""))))[:4096],
            )
            self._result = plain(data.get("result"))
        else:
            self._log.append(kind, {str(plain(str(key))): plain(value) for key, value in data.items()})

    def _end(self, started: float, survivors: list[Survivor], *, oom_killed: bool) -> Receipt:
        pumps = self._pumps
        for pump in pumps:
            pump.close()
            if pump.lines.cut:
                self._log.append(Kind.GAP, {"code": "line_too_long", "lines": pump.lines.cut})
        code, number = _split(self._agent_status)
        receipts.release(self._session)
        self._finish_parser(code)
        if self._reason == "exited" and self._parser is None and not self._status:
            self._status, self._detail = Outcome.AGENT_FAILED.value, "the agent's process ended without saying a result"
        self._judge_calls(code)
        self._detail = self._detail or _why(code, number, oom_killed=oom_killed)
        self._log.append(
            Kind.AGENT_EXITED,
            {"exit_code": code, "signal": number, "status": self._status, "detail": self._detail, "result": self._result},
        )
        self._log.append(
            Kind.ENDED, {"reason": self._reason or "not_started", "cleanup_confirmed": not survivors, "reaped": self._reaped}
        )
        self._log.close()
        receipt = Receipt(
            session_id=self._request.session_id,
            request_digest=self._digest,
            agent=self._request.agent,
            started_at=started,
            ended_at=time.time(),
            exit_code=code,
            signal=number,
            status=self._status,
            detail=self._detail,
            timed_out=self._reason == "deadline",
            stopped=self._reason == "stopped",
            oom_killed=oom_killed,
            supervisor_lost=False,
            cleanup_confirmed=not survivors,
            survivors=survivors,
            reaped=self._reaped,
            evidence_bytes=self._log.bytes,
            evidence_sha256=self._log.sha256,
            stdout_bytes=pumps[0].total if pumps else 0,
            stderr_bytes=pumps[1].total if pumps else 0,
            output_truncated=any(pump.truncated for pump in pumps),
            peak_rss_bytes=self._peak,
            cpu_seconds=round(self._cpu, 3),
        )
        receipts.write_receipt(self._session, receipt, tell=self._tell)
        return receipt


def supervise(
    request: Request,
    digest: str,
    session: SessionPaths,
    runtime: RuntimePaths,
    environ: Mapping[str, str],
    *,
    watchdog: processes.Process | None = None,
    tell: int = -1,
) -> int:
    """Be the supervisor process: leave the exec's session, adopt orphans, run, and return an exit status."""
    os.setsid()
    processes.become_subreaper()
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(session.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    branded = processes.take_brand(session_brand(session.path))
    introduce = partial(receipts.introduce, session, agent=request.agent, watchdog=watchdog, branded=branded)
    introduce(digest)
    Supervisor(request, digest, session, runtime, environ, introduce=introduce, tell=tell).run()
    sys.stdout.flush()
    return 0


def _why(code: int | None, number: int | None, *, oom_killed: bool) -> str:
    """Say in words what ended an agent that said nothing; exit status 137 alone could be either."""
    memory = "out of memory: the kernel killed a process of this group" if oom_killed else ""
    if number is None:
        return memory if code else ""
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"killed by {name}{'; ' if memory else ''}{memory}"


def _patience(model: Model) -> str:
    """Say beforehand how long a model may fail."""
    tries = model.max_retries + 1
    usual, most = model.failed_after_s(), model.failed_after_s(retry_after_s=math.inf)
    return (
        f"one try of a model call takes at most {model.timeout_s:g} s; with our own clients a call has failed for good after "
        f"{tries} tries and at most {usual:.0f} s, or {most:.0f} s if the model asks for pauses by Retry-After"
    )


def _split(status: int | None) -> tuple[int | None, int | None]:
    """Split a wait status into (exit code, signal); both None when the agent never ran."""
    if status is None:
        return None, None
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None
