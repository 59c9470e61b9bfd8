# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""However a model fails, an agent of either kind ends soon, with the outcome that says so, and never with a gradable zero.

Each row is a whole session: supervisor, gateway, agent. The table of them (build/model-failures.md) is written from what was
seen.
"""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from artifacts_fixtures import runtime_tree
from sample_repo import PROMPT, make_sample_repo
from scripted_model import Fault, ScriptedModel
from test_supervisor import Runner

from boxstrap.runner.layout import RuntimePaths
from boxstrap.runner.wire import Model, Outcome, Receipt, outcome_of

__all__ = ["runtime_tree"]

ASK = str(Path(__file__).parent / "children" / "ask_model.py")
TABLE = Path(__file__).resolve().parent.parent / "build" / "model-failures.md"
RETRIES = 2
TIMEOUT_S = 0.6


@dataclass
class Seen:
    """What one session came to."""

    requests: int
    calls: list[dict[str, Any]]
    seconds: float
    receipt: Receipt
    events: list[dict[str, Any]]

    @property
    def outcome(self) -> Outcome:
        """The outcome."""
        return outcome_of(self.receipt)


class Sessions:
    """Runs sessions of either agent against a model that fails as it is told."""

    def __init__(self, folder: Path, runtime: RuntimePaths) -> None:
        self._folder, self._runtime = folder, runtime
        self._runners: list[Runner] = []

    def run(
        self, agent: str, model: ScriptedModel, *words: str, url: str = "", timeout_s: float = TIMEOUT_S, **fields: Any
    ) -> Seen:
        """Run one to its end. `words` are ask_model.py's; `url` is another one than the model's."""
        number = len(self._runners)
        runner = Runner(self._folder / "sessions" / f"f{number}-{self._folder.name}"[:80], self._runtime)
        self._runners.append(runner)
        where = Model(url=url or model.url, name="fix-bug", max_retries=RETRIES, timeout_s=timeout_s)
        make_sample_repo(self._folder / f"repo{number}")
        argv = ["python3", ASK, "--retries", str(RETRIES), *words] if agent == "command" else []
        fields = {"workdir": str(self._folder / f"repo{number}"), "agent": agent, "model": where, "prompt": PROMPT, **fields}
        runner.request(*argv, **fields)
        before = len(model.calls)
        _, receipt = runner.run()
        calls = [event["data"] for event in runner.events("model_call")]
        seconds = receipt.ended_at - (receipt.started_at or 0.0)
        return Seen(len(model.calls) - before, calls, seconds, receipt, runner.events())

    def repo(self, name: str) -> Path:
        """Name a folder for a repository."""
        return self._folder / name

    def stop(self) -> None:
        """See that none is left."""
        for runner in self._runners:
            runner.verb("stop")


@pytest.fixture
def sessions(tmp_path: Path, runtime_tree: RuntimePaths) -> Iterator[Sessions]:
    """Sessions on the packed interpreter and the lean payload."""
    sessions = Sessions(tmp_path, runtime_tree)
    yield sessions
    sessions.stop()


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Collects rows, and writes them down at the end."""
    rows: list[str] = []
    yield rows
    TABLE.parent.mkdir(exist_ok=True)
    head = "| fault | agent | requests sent | seconds | at most | outcome | gradable |\n|---|---|---|---|---|---|---|\n"
    TABLE.write_text(head + "".join(rows))


FAULTS = [
    # fault, requests that NOOA's client and the command send
    ("500", 3),
    ("429", 3),
    ("429=1", 3),  # Retry-After: 1
    ("401", 1),
    ("400", 1),
    ("hang", 3),
    ("break", 3),
    ("garbage", 3),
    ("refused", 0),
    ("dns", 0),
]


@pytest.mark.parametrize("agent", ["nooa", "command"])
@pytest.mark.parametrize(("fault", "requests"), FAULTS)
def test_model_that_fails_for_good_is_the_models_failure(
    sessions: Sessions, table: list[str], fault: str, requests: int, agent: str
) -> None:
    """Known requests, known time, model_failed: retryable and never gradable."""
    with ScriptedModel() as model, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = {"refused": f"http://127.0.0.1:{nobody.getsockname()[1]}/v1", "dns": "http://model.invalid/v1"}.get(fault, "")
        model.faults = [] if url else [Fault.parse(fault)]
        seen = sessions.run(agent, model, url=url)
    asked_s = 1.0 if "=" in fault else 0.0
    bound = Model(url="", name="", max_retries=RETRIES, timeout_s=TIMEOUT_S).failed_after_s(retry_after_s=asked_s)
    name = {"429=1": "429, Retry-After: 1", "break": "cut in mid-stream", "dns": "no such host"}.get(fault, fault)
    graded = "yes" if seen.outcome.gradable else "no"
    table.append(f"| {name} | {agent} | {seen.requests} | {seen.seconds:.1f} | {bound:.1f} | {seen.outcome} | {graded} |\n")
    assert (seen.outcome, seen.outcome.gradable, seen.outcome.retryable) == (Outcome.MODEL_FAILED, False, True), seen.receipt
    assert seen.requests == requests
    tries = 1 if fault in {"401", "400"} else RETRIES + 1
    assert [(call["seq"], call["retry"]) for call in seen.calls] == [(1, False), *[(1, True)] * (tries - 1)]
    assert sum(call["seconds"] for call in seen.calls) < bound
    assert all(call["error"] for call in seen.calls)


@pytest.mark.parametrize(
    ("agent", "fault"),
    [("nooa", "429:2"), *(("command", fault) for fault in ("500:1", "429:2", "hang:1", "break:1", "garbage:2"))],
)
def test_later_good_call_clears_a_failure(sessions: Sessions, fault: str, agent: str) -> None:
    """What was retried with success is history."""
    with ScriptedModel(faults=[Fault.parse(fault)]) as model:
        seen = sessions.run(agent, model, "--calls", "2")
    assert seen.outcome is Outcome.COMPLETED, seen.receipt
    times = int(fault[-1])
    assert [call["retry"] for call in seen.calls[: times + 1]] == [False, *[True] * times]
    assert seen.requests == len(seen.calls) == seen.calls[-1]["seq"] + times


@pytest.mark.parametrize("fault", ["500", "401", "break", "hang"])
def test_agent_that_shrugs_at_a_failed_model_has_not_succeeded(sessions: Sessions, fault: str) -> None:
    """Exit code 0 after a model that is down is no success: it would be a gradable zero."""
    with ScriptedModel(faults=[Fault.parse("slow=0:1"), Fault.parse(fault)]) as model:
        seen = sessions.run("command", model, "--calls", "2", "--shrug")
    assert seen.receipt.exit_code == 0
    assert seen.outcome is Outcome.MODEL_FAILED
    assert seen.receipt.detail.startswith("the last model call failed: ")


def test_prompt_that_is_too_long_is_the_policys_affair(sessions: Sessions) -> None:
    """A model that refuses a long prompt works: the agent's own end counts."""
    with ScriptedModel(faults=[Fault.parse("context")]) as model:
        seen = sessions.run("command", model, "--shrug")
    assert (seen.calls[0]["error"], seen.outcome) == ("too_long", Outcome.COMPLETED)


@pytest.mark.parametrize(("fault", "outcome"), [("hang", Outcome.MODEL_FAILED), ("slow=0:1", Outcome.DEADLINE_EXCEEDED)])
def test_deadline_is_the_models_failure_only_if_it_never_answered(sessions: Sessions, fault: str, outcome: Outcome) -> None:
    """A model that hangs until the worker's ceiling is no partial result of the agent."""
    with ScriptedModel(faults=[Fault.parse(fault), Fault.parse("hang")]) as model:
        seen = sessions.run("command", model, "--calls", "9", "--pause", "0.1", timeout_s=60.0, deadline_s=2.0)
    assert seen.receipt.timed_out
    assert seen.outcome is outcome
    assert seen.calls[-1]["error"] in {"session_ended", "client_gone"}


def test_agent_that_kills_the_gateway_gets_no_grade_for_it(sessions: Sessions) -> None:
    """What nobody recorded, nobody grades."""
    # Whatever has our parent, the supervisor, as its own and is not ourselves: no other session's.
    sibling = '[ "$4" = $PPID ] && [ "$1" != $$ ] && kill -9 "$1"'
    kill = f"for p in /proc/[0-9]*; do set -- $(cat $p/stat 2>/dev/null); {sibling}; done; sleep 0.3"
    with ScriptedModel() as model:
        seen = sessions.run("command", model, argv=["sh", "-c", kill])
    assert seen.outcome is Outcome.MODEL_FAILED
    assert seen.receipt.cleanup_confirmed


@pytest.mark.parametrize("agent", ["nooa", "command"])
@pytest.mark.parametrize(("budget", "faults", "requests"), [(2, [], 2), (0, [], 0), (2, ["500:1"], 3)])
def test_budget_ends_an_agent_with_what_it_has(
    sessions: Sessions, budget: int, faults: list[str], requests: int, agent: str
) -> None:
    """Never one call more is sent; a retry is the same call. The result is partial and gradable, whatever the agent says."""
    with ScriptedModel(faults=[Fault.parse(fault) for fault in faults]) as model:
        seen = sessions.run(agent, model, "--calls", "50", max_policy_calls=budget)
    assert (seen.outcome, seen.outcome.gradable) == (Outcome.POLICY_BUDGET_EXHAUSTED, True), seen.receipt
    assert seen.requests == requests == len(seen.calls)
    assert seen.receipt.cleanup_confirmed


def test_agent_that_goes_on_beyond_its_budget_is_ended_after_the_grace(sessions: Sessions) -> None:
    """An opaque agent may finish its turn, and no more."""
    with ScriptedModel() as model:
        seen = sessions.run("command", model, "--calls", "2", "--hold", "60", max_policy_calls=1, grace_s=0.5)
    assert seen.outcome is Outcome.POLICY_BUDGET_EXHAUSTED
    assert seen.seconds < 15
    assert seen.requests == 1


CHANGING = {"t", "mono", "seconds", "ttfb_seconds", "pid", "peak_rss_bytes", "cpu_seconds"}
"""Fields that differ between two runs; so do ids, and digests of what holds one."""


def stripped(part: Any) -> Any:
    """Leave out of an event what may differ between two runs."""
    if isinstance(part, dict):
        kept = {
            key: value for key, value in part.items() if key not in CHANGING and not key.endswith(("_at", "_id", "_sha256"))
        }
        return {key: stripped(value) for key, value in kept.items()}
    if isinstance(part, list):
        return [stripped(value) for value in part]
    return re.sub(r"prefill_\w{8}|\[[0-9a-f]{8}\]|in \d+\.\d+s", "", part) if isinstance(part, str) else part


@pytest.mark.parametrize("agent", ["nooa", "command"])
def test_same_session_twice_gives_the_same_evidence(sessions: Sessions, agent: str) -> None:
    """But for times and ids: order and content of every event are the same, a failed call included.

    Order across pipes is exact while the supervisor is less than one call behind: a model takes its time, and so does this.
    """
    folder = sessions.repo("again")
    seen = []
    for _ in range(2):
        make_sample_repo(folder)
        with ScriptedModel(faults=[Fault.parse("500:1"), Fault.parse("slow=0.2")]) as model:
            run = sessions.run(agent, model, "--calls", "3", workdir=str(folder), timeout_s=30.0)
        assert run.outcome is Outcome.COMPLETED
        seen.append([stripped(event) for event in run.events if event["kind"] != "heartbeat"])
        shutil.rmtree(folder)
    for one, other in zip(*seen, strict=True):
        assert one == other
