# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Every agent through the same cases in the same box: the outcome is the same wherever the agent can say it.

All are the real agents but pool, whose stand-in is strict (children/fake_pool.py); the model is scripted. It prints a table.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from containers import Box, Containers, InternalNetwork
from sample_repo import PROMPT, make_sample_repo
from scripted_model import Fault, ScriptedModel

from boxstrap.controller.budgets import Budgets
from boxstrap.controller.collect import read_events
from boxstrap.controller.convert import story_of, to_responses
from boxstrap.controller.programs import Program
from boxstrap.controller.sandboxes.docker import DockerSandbox
from boxstrap.controller.sandboxes.local import LocalSandbox
from boxstrap.controller.session import Result, SessionSpec, open_session
from boxstrap.runner.wire import Event, Kind, Model, Outcome

CHILDREN = Path(__file__).parent / "children"
AGENTS = ("nooa", "pool", "opencode", "mini-swe-agent", "command")
MARKED = "grep -lz '^BOXSTRAP_SESSION=' /proc/[0-9]*/environ 2>/dev/null | wc -l"
DEADLINE_S = 12.0


@dataclass(frozen=True)
class Case:
    """What happens, and the outcome that it has for every agent but the `mute` ones, which cannot say so: they completed."""

    name: str
    script: str
    outcome: Outcome
    fault: str = ""
    max_policy_calls: int | None = None
    deadline_s: float = 120.0
    mute: tuple[str, ...] = ()


CASES = (
    Case("success", "fix-bug", Outcome.COMPLETED),
    Case("gave up", "give-up", Outcome.GAVE_UP, mute=("opencode", "command")),
    Case("crash", "crash", Outcome.AGENT_FAILED),
    Case("deadline", "sleep", Outcome.DEADLINE_EXCEEDED, deadline_s=DEADLINE_S),
    Case("model refuses", "fix-bug", Outcome.MODEL_FAILED, fault="401"),
    Case("model fails", "fix-bug", Outcome.MODEL_FAILED, fault="500"),
    Case("budget", "chatter:9", Outcome.POLICY_BUDGET_EXHAUSTED, max_policy_calls=2),
)


@dataclass(frozen=True)
class Row:
    """One line of the table, and what is wrong with it."""

    agent: str
    case: Case
    result: Result
    seconds: float
    events: list[Event]
    problems: list[str]

    def __str__(self) -> str:
        """Print it."""
        calls = sum(event.kind == Kind.MODEL_CALL for event in self.events)
        name = f"{self.agent} (stand-in)" if self.agent == "pool" else self.agent
        line = (
            f"{name:<16} {self.case.name:<14} {self.result.outcome:<24} {self.seconds:>6.1f} {calls:>6} {len(self.events):>7}"
        )
        return "\n".join([line, *(f"    NOT AS IT SHOULD BE: {problem}" for problem in self.problems)])


@contextlib.contextmanager
def models(bind: str) -> Iterator[dict[str, str]]:
    """Serve one model for each fault, and give their URLs; the script is the model's name."""
    with contextlib.ExitStack() as stack:
        urls = {}
        for fault in {case.fault for case in CASES}:
            faults = [Fault.parse(fault)] if fault else []
            urls[fault] = stack.enter_context(ScriptedModel(faults=faults, bind=bind)).url
        yield urls


@pytest.mark.container
async def test_every_agent_has_the_same_outcome_for_the_same_end(
    container: Containers, internal_network: InternalNetwork, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Agents in parallel, each through all cases: outcome, repository, tool calls with their results, nothing left behind."""
    make_sample_repo(tmp_path / "bills")
    box = container("task", network=internal_network.name)
    box.put(CHILDREN / "tiny_agent.py", "/usr/local/lib/tiny_agent.py")
    for agent in AGENTS:
        for number, _ in enumerate(CASES):
            box.put(tmp_path / "bills", f"/work/{agent}-{number}")
    with models(internal_network.host) as urls:
        found = await asyncio.gather(*(through_all_cases(box, agent, urls, tmp_path) for agent in AGENTS))
    rows = [row for agent_rows in found for row in agent_rows]
    with capsys.disabled():
        print(f"\n{'agent':<16} {'case':<14} {'outcome':<24} {'s':>6} {'calls':>6} {'events':>7}", *rows, sep="\n")
    assert [str(row) for row in rows if row.problems] == []
    assert box.check(MARKED) == "0"
    assert box.check("ls -A /tmp; ls -A $HOME | grep -v -e ^.bashrc -e ^.profile || :") == ""


async def through_all_cases(box: Box, agent: str, urls: dict[str, str], folder: Path) -> list[Row]:
    """Run one agent through the cases, one after the other: the first session installs, the others reuse."""
    return [await run(box, agent, number, urls[case.fault], folder / f"{agent}-{number}") for number, case in enumerate(CASES)]


async def run(box: Box, agent: str, number: int, url: str, out: Path) -> Row:
    """Run one session and look at what is left of it."""
    case, workdir = CASES[number], f"/work/{agent}-{number}"
    spec = SessionSpec(
        session_id=f"{agent}-{number}",
        agent=agent,
        workdir=workdir,
        out=out,
        model=Model(url=url, name=case.script, api="responses" if agent == "nooa" else "chat", max_retries=1),
        budgets=Budgets().with_worker(case.deadline_s),
        program=Program(source=str(CHILDREN / "fake_pool.py"), accept_eula=True) if agent == "pool" else None,
        argv=["python3", "/usr/local/lib/tiny_agent.py"] if agent == "command" else [],
        max_policy_calls=case.max_policy_calls,
    )
    begun = time.monotonic()
    async with open_session(DockerSandbox(box.id), spec) as session:
        result = await session.invoke(spec.request(PROMPT))
    seconds = time.monotonic() - begun
    events = list(read_events(result.evidence))
    return Row(agent, case, result, seconds, events, list(problems(box, agent, case, result, events)))


def problems(box: Box, agent: str, case: Case, result: Result, events: list[Event]) -> Iterator[str]:
    """Say what is not as it should be."""
    workdir = f"/work/{agent}-{CASES.index(case)}"
    expected = Outcome.COMPLETED if agent in case.mute else case.outcome
    if result.outcome is not expected:
        yield f"outcome {result.outcome}, needed {expected}: {result.detail}"
    if result.receipt is None or not result.receipt.cleanup_confirmed:
        yield f"the receipt does not confirm the cleanup: {result.receipt}"
    if result.gaps:
        yield f"gaps {result.gaps}"
    status = box.check(f"git -C {workdir} status --porcelain --ignored")
    if status != (" M bills/split.py" if case.name == "success" else ""):
        yield f"git status says {status!r}"
    if case.name == "success" and box.exec(f"cd {workdir} && python3 -B -m unittest -q").code != 0:
        yield "the tests fail"
    called = [event.data["tool_call_id"] for event in events if event.kind == Kind.TOOL_CALL]
    answered = [event.data["tool_call_id"] for event in events if event.kind == Kind.TOOL_RESULT]
    killed_at_once = case.name in {"crash", "deadline"} and agent in {"nooa", "mini-swe-agent"}
    if sorted(map(str, called)) != sorted(map(str, answered)) and not killed_at_once:
        yield f"calls {called}, results {answered}"
    if case.name == "success" and agent != "command" and len(called) < 3:
        yield f"only {len(called)} tool calls are in the evidence"
    yield from problems_of_items(case, events, called)
    if case.name != "deadline" and not any(event.kind == Kind.MODEL_CALL for event in events):
        yield "no model call is in the evidence"


def problems_of_items(case: Case, events: list[Event], called: list[object]) -> Iterator[str]:
    """Convert the evidence to Responses items, and say what is missing: each call with its output, after it."""
    items = to_responses(story_of(events))["output"]
    assert isinstance(items, list)
    calls = [item["call_id"] for item in items if item["type"] == "function_call"]
    outputs = [item["call_id"] for item in items if item["type"] == "function_call_output"]
    if sorted(set(map(str, called)) - set(calls)):
        yield f"calls {called} are not all among the items' {calls}"
    if case.name == "success" and (len(calls) < 3 or len(set(calls)) != len(calls) or set(outputs) - set(calls)):
        yield f"items have the calls {calls} and the outputs {outputs}"
    if case.name == "gave up" and not any(item["type"] == "message" for item in items):
        yield f"no message is among the items: {items}"


async def test_agent_that_waits_for_a_login_is_stopped_as_a_setup_failure(tmp_path: Path) -> None:
    """Nobody will log in, so nobody waits for the deadline; and it is never gradable."""
    with ScriptedModel("sleep") as model:
        spec = SessionSpec(
            session_id="login",
            agent="pool",
            workdir=str(tmp_path),
            out=tmp_path / "out",
            model=Model(url=model.url, name="m", api="chat"),
            program=Program(source=str(CHILDREN / "fake_pool.py"), accept_eula=True),
            env={"FAKE_POOL_LINE": '{"type":"oauth_url","url":"https://login.invalid/"}'},
        )
        async with open_session(LocalSandbox(tmp_path / "box"), spec) as session:
            result = await session.invoke(spec.request(PROMPT))
    assert (result.outcome, result.gradable) == (Outcome.SETUP_FAILED, False)
    assert "login" in result.detail
    assert result.receipt is not None
    assert (result.receipt.timed_out, result.receipt.cleanup_confirmed) == (False, True)
    assert list(read_events(result.evidence))[-1].data["reason"] == "unusable"
