# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The real driver with the real BenchAgent, out of the packed interpreter and the lean payload, against a scripted model."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from artifacts_fixtures import runtime_tree
from driver_session import DriverSession
from polling import eventually
from sample_repo import PROMPT, make_sample_repo
from scripted_model import Fault, ScriptedModel

from boxstrap.runner.agents import get, nooa
from boxstrap.runner.layout import RuntimePaths, SessionPaths
from boxstrap.runner.wire import Model, Request

__all__ = ["runtime_tree"]

DIALECTS = ("responses", "chat")
Start = Callable[..., DriverSession]


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """The sample repository."""
    make_sample_repo(tmp_path / "repo")
    return tmp_path / "repo"


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    """A model server that refuses what NeMo Gym refuses."""
    with ScriptedModel(strict=True) as model:
        yield model


@pytest.fixture
def start(tmp_path: Path, repo: Path, model: ScriptedModel, runtime_tree: RuntimePaths) -> Iterator[Start]:
    """Starts a driver on the sample repository; `script` names the model's script."""
    started: list[DriverSession] = []

    def begin(script: str = "fix-bug", *, env: dict[str, str] | None = None, **more: Any) -> DriverSession:
        of_model = [key for key in ("url", "api", "headers", "timeout_s", "max_retries") if key in more]
        where = Model(url=model.url, name=script, max_retries=1)
        where = replace(where, **{key: more.pop(key) for key in of_model})
        request = Request(session_id="s", agent="nooa", workdir=str(repo), prompt=PROMPT, model=where)
        folder = tmp_path / f"driver-{len(started)}"
        folder.mkdir()
        started.append(DriverSession(replace(request, **more), runtime_tree, folder, env))
        return started[-1]

    yield begin
    for driver in started:
        driver.kill()


def changes(repo: Path) -> str:
    """What git sees in the workdir, ignored files included."""
    command = ["git", "status", "--porcelain", "--ignored"]
    return subprocess.run(command, cwd=repo, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("api", DIALECTS)
def test_driver_solves_the_task_and_records_it(start: Start, repo: Path, model: ScriptedModel, api: str) -> None:
    """The agent reads, edits, tests and returns; every step is an event; nothing but the edit is left behind."""
    driver = start(api=api)
    assert driver.wait() == 0, driver.output.read_text()
    result = driver.result
    assert result["status"] == "completed"
    assert result["result"]["command_to_verify"] == "python3 -m unittest -q"
    assert changes(repo) == " M bills/split.py\n"
    assert list(driver.home.iterdir()) == []
    assert len(model.calls) == 4

    kinds = [event["kind"] for event in driver.events if event["kind"] not in {"log", "model_call"}]  # two pipes, two readers
    turn = ["tool_call", "python_execution", "tool_result"]
    assert kinds == [
        *("phase", "phase", "python_execution"),  # import, construct, NOOA's own first cell
        *("reasoning", *turn),
        *turn,
        *turn,
        *("tool_call", "tool_result"),  # return_result
        *("phase", "message", "gap", "result"),
    ]
    assert [phase["name"] for phase in driver.of("phase")] == ["import", "construct", "solve"]
    assert [cell["synthetic"] for cell in driver.of("python_execution")] == [True, False, False, False]
    assert "Ran 3 tests" in driver.of("python_execution")[-1]["stdout"]
    assert {cell["status"] for cell in driver.of("python_execution")} == {"completed"}
    called = [(call["tool_call_id"], call["tool_name"]) for call in driver.of("tool_call")]
    assert called == [(done["tool_call_id"], done["tool_name"]) for done in driver.of("tool_result")]
    assert driver.of("gap")[0]["code"] == "non_trainable_terminal_output"
    assert driver.of("message")[0]["final"] is True


@pytest.mark.parametrize("api", DIALECTS)
def test_driver_accounts_for_every_model_call(start: Start, model: ScriptedModel, api: str) -> None:
    """Sequence, dialect, status, tokens, finish reason, payloads and owner; headers, path prefix and cookies travel."""
    driver = start(api=api, url=model.url.replace("/v1", "/ng-rollout/key/v1"), headers={"x-session-id": "s-1"})
    assert driver.wait() == 0
    calls = driver.of("model_call")
    assert [call["seq"] for call in calls] == [1, 2, 3, 4]
    assert {(call["dialect"], call["status"], call["retry"], call["error"]) for call in calls} == {(api, 200, False, None)}
    assert all(call["usage"]["input_tokens"] > 1000 and call["usage"]["cached_tokens"] > 500 for call in calls)
    assert calls[0]["usage"]["reasoning_tokens"] > 0
    assert calls[0]["finish_reason"] == ("completed" if api == "responses" else "tool_calls")
    assert {call["invocation_id"] for call in calls} == {driver.of("tool_call")[0]["invocation_id"]}
    path = "/ng-rollout/key/v1/responses" if api == "responses" else "/ng-rollout/key/v1/chat/completions"
    for call, sent in zip(calls, model.calls, strict=True):
        assert (sent.path, sent.headers["x-session-id"]) == (path, "s-1")
        assert call["request"] == sent.body
        assert isinstance(sent.body, dict)
        assert not {"cache_control", "prompt_cache_key"} & set(sent.body)
    assert model.calls[-1].headers["cookie"].startswith("policy=")


FAULTS = [
    # fault, retries, timeout, requests sent, outcome, a word of the detail
    ("500", 2, 30.0, 3, "model_failed", "HTTP 500"),
    ("503", 0, 30.0, 1, "model_failed", "HTTP 503"),
    ("429=0", 3, 30.0, 4, "model_failed", "HTTP 429"),
    ("401", 4, 30.0, 1, "model_failed", "HTTP 401"),
    ("400", 4, 30.0, 1, "model_failed", "HTTP 400"),
    ("hang", 1, 0.5, 2, "model_failed", "did not answer within 0.5 s"),  # the gateway's bound
    ("break", 1, 30.0, 2, "model_failed", "broke off"),
    ("garbage", 1, 30.0, 2, "model_failed", "no responses answer"),
    ("failed", 1, 30.0, 2, "model_failed", "says it failed"),
    ("context", 4, 30.0, 10, "gave_up", "maximum context length"),
    ("500:1", 1, 30.0, 5, "completed", "returned a result"),
    ("429=0.4:2", 2, 30.0, 6, "completed", "returned a result"),
    ("break:1", 1, 30.0, 5, "completed", "returned a result"),
    ("slow=0.3:1", 1, 30.0, 4, "completed", "returned a result"),
]


@pytest.mark.parametrize(("fault", "retries", "timeout", "requests", "outcome", "word"), FAULTS)
def test_driver_bounds_every_model_failure(
    start: Start, model: ScriptedModel, fault: str, retries: int, timeout: float, requests: int, outcome: str, word: str
) -> None:
    """However the model fails, the number of requests is known beforehand and the outcome says whose failure it was."""
    model.faults = [Fault.parse(fault)]
    driver = start(max_retries=retries, timeout_s=timeout)
    code = driver.wait()
    assert driver.result["status"] == outcome, driver.result
    assert code == (0 if outcome == "completed" else 1)
    assert word in driver.result["detail"]
    assert len(model.calls) == requests == len(driver.of("model_call"))
    assert sum(call["retry"] for call in driver.of("model_call")) == requests - driver.of("model_call")[-1]["seq"]


def test_driver_waits_as_long_as_the_model_asks(start: Start, model: ScriptedModel) -> None:
    """Retry-After is obeyed instead of the usual pause."""
    model.faults = [Fault.parse("429=1.5:1")]
    assert start().wait() == 0
    assert 1.4 < model.calls[1].at - model.calls[0].at < 4


def test_driver_names_a_refused_connection(start: Start) -> None:
    """Nobody listens: the cause is in the result, not lost in a wrapper."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        driver = start(url=f"http://127.0.0.1:{unused.getsockname()[1]}/v1")
        assert driver.wait() == 1
    assert driver.result["status"] == "model_failed"
    assert any("ConnectionRefusedError" in cause or "ConnectError" in cause for cause in driver.result["result"]["causes"])
    assert [call["status"] for call in driver.of("model_call")] == [None, None]


@pytest.mark.parametrize(("budget", "faults", "requests"), [(2, [], 2), (0, [], 0), (2, ["500:1"], 3)])
def test_driver_never_sends_one_call_more_than_the_budget(
    start: Start, model: ScriptedModel, budget: int, faults: list[str], requests: int
) -> None:
    """max_policy_calls counts what the agent asked; a retry is the same call and counts as what it is."""
    model.faults = [Fault.parse(fault) for fault in faults]
    driver = start("chatter", max_policy_calls=budget)
    assert driver.wait() == 1
    assert driver.result["status"] == "policy_budget_exhausted"
    assert len(model.calls) == requests


def test_driver_tells_a_policy_that_fails_from_a_model_that_fails(start: Start) -> None:
    """A model that answers, but never calls a tool, is the policy's failure."""
    driver = start("give-up")
    assert driver.wait() == 1
    result = driver.result
    assert (result["status"], result["result"]["termination_reason"]) == ("gave_up", "invalid_policy_output")
    assert result["detail"].startswith("GenerationError")
    assert [message["text"] for message in driver.of("message")] == ["I cannot complete this task."] * 3


def test_driver_reads_tool_calls_that_the_server_did_not_parse(start: Start) -> None:
    """A chat server without a tool parser leaves them in the text; NOOA's own client digs them out, and so does ours."""
    driver = start("unparsed", api="chat")
    assert driver.wait() == 0, driver.result
    assert driver.of("python_execution")[-1]["stdout"] == "dug out\n"


def test_driver_bounds_what_one_event_carries(start: Start) -> None:
    """A cell that shows megabytes makes no event of megabytes."""
    driver = start("flood")
    assert driver.wait() == 0, driver.result
    assert max(len(str(event)) for event in driver.events) < 256 * 1024


@pytest.mark.parametrize("api", DIALECTS)
def test_lean_payload_delegates_and_summarizes(start: Start, api: str) -> None:
    """Sub-agents with structured output and NOOA's own summarizer work without litellm."""
    driver = start("delegate", api=api)
    assert driver.wait() == 0, driver.result
    notes = driver.of("log")
    assert {"title", "summarize"} <= {note["method"] for note in notes if note["name"] == "invocation"}
    assert any(note["name"] == "Summary" for note in notes)
    assert {note["status"] for note in notes if note["name"] == "invocation"} == {"completed"}


def test_driver_reads_no_configuration_from_the_task(start: Start, repo: Path, model: ScriptedModel) -> None:
    """A repository that holds NOOA's configuration files changes nothing of what is sent."""
    (repo / ".nooa").mkdir()
    (repo / ".nooa" / "llm_config.yaml").write_text(
        "models:\n  fix-bug:\n    model_name: other\n    temperature: 0.123\n    context_window: 77\n"
    )
    (repo / ".nooa" / "secrets.yaml").write_text("env:\n  LEAKED: yes\n")
    (repo / ".env").write_text("LEAKED=yes\nOPENAI_API_BASE=http://127.0.0.1:9\n")
    (repo / "httpx.py").write_text("raise SystemExit('the workdir is on sys.path')\n")
    driver = start("fix-bug")
    assert driver.wait() == 0
    for call in model.calls:
        assert isinstance(call.body, dict)
        assert call.body["model"] == "fix-bug"
        assert "temperature" not in call.body


def test_driver_sends_no_prompt_anywhere_else(start: Start, model: ScriptedModel) -> None:
    """NOOA's tracing stays off: nothing reaches a service on port 5001, nor the task's proxy, which answers for every host."""
    with ScriptedModel() as proxy:
        address = proxy.url.removesuffix("/v1")
        env = {f"{kind}_proxy": address for kind in ("http", "https", "all", "none")}
        with _listener(5001) as traced:
            driver = start("look-around", env={**env, "OTLP_PROBE_TIMEOUT": "1"})
            assert driver.wait() == 0
            assert traced is None or not _was_called(traced)
        assert proxy.requests == []
    assert f"http_proxy={address}" in driver.of("python_execution")[-1]["stdout"]
    assert len(model.calls) == 2


class _listener:  # noqa: N801 (a context manager that reads as a function)
    """Listens on a port of this host; gives None when someone else has it."""

    def __init__(self, port: int) -> None:
        self.port = port

    def __enter__(self) -> socket.socket | None:
        self.socket = socket.socket()
        try:
            self.socket.bind(("127.0.0.1", self.port))
        except OSError:
            return None
        self.socket.listen()
        return self.socket

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def _was_called(listener: socket.socket) -> bool:
    listener.setblocking(False)
    try:
        listener.accept()
    except BlockingIOError:
        return False
    return True


def test_driver_leaves_the_shells_environment_to_the_task(start: Start, repo: Path, runtime_tree: RuntimePaths) -> None:
    """The agent's shell starts in the workdir, with the task's own variables and none of ours but the marker."""
    task = {"BOXSTRAP_TASK_LD_BIND_NOW": "1", "PYTHONPATH": "/opt/task", "PYTHONHOME": "/opt/nowhere"}
    driver = start("look-around", env={**task, "NEMO_OO_USER_DIR": "/task/own", "LC_ALL": "", "LANG": ""})
    assert driver.wait() == 0, driver.output.read_text()
    shown = driver.of("python_execution")[-1]["stdout"].split("\\n")
    variables = dict(line.split("=", 1) for line in shown if "=" in line)
    assert shown[0].endswith(str(repo.resolve()))
    assert {"LD_BIND_NOW": "1", "PYTHONPATH": "/opt/task", "PYTHONHOME": "/opt/nowhere"}.items() <= variables.items()
    assert variables["NEMO_OO_USER_DIR"] == "/task/own"
    assert variables["BOXSTRAP_SESSION"] == "s"
    added = {"BOXSTRAP_EVENTS_FD", "BOXSTRAP_SESSION_DIR", "OTLP_ENDPOINT", "NEMO_OO_PROJECT_DIR", "LITELLM_MODE", "LC_CTYPE"}
    assert not added & set(variables)
    assert not any(f"pipe:[{driver.inode}]" in line or runtime_tree.path in line for line in shown)


def test_driver_ends_soon_on_sigterm(start: Start) -> None:
    """Asked to stop in the middle of a tool, it says so, and that the tool was interrupted."""
    driver = start("sleep")
    eventually(lambda: driver.of("tool_call"), within_s=30)
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait(within_s=4) == 1
    assert driver.result["status"] == "cancelled"
    assert driver.of("python_execution")[-1]["status"] == "interrupted"
    assert driver.of("tool_result")[-1]["status"] == "incomplete"


def test_driver_ends_on_sigterm_although_a_cell_never_yields(start: Start) -> None:
    """`while True: pass` blocks the event loop, not the end."""
    driver = start("spin")
    eventually(lambda: driver.of("tool_call"), within_s=30)
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait(within_s=6) == 1
    assert driver.result["status"] == "cancelled"
    assert driver.of("python_execution")[-1]["status"] == "interrupted"


def test_driver_ends_on_sigterm_while_it_imports(start: Start) -> None:
    """A stop that comes before the agent is there is obeyed as well."""
    driver = start()
    eventually(lambda: b"nooa" in Path(f"/proc/{driver.process.pid}/maps").read_bytes() or driver.events, within_s=30)
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait(within_s=6) in {1, -signal.SIGTERM}
    assert not driver.events or driver.result["status"] == "cancelled"


def test_driver_does_not_act_unrecorded(start: Start, model: ScriptedModel) -> None:
    """When nobody reads its events any more, it ends instead of going on."""
    driver = start("chatter:200")
    eventually(lambda: len(driver.of("tool_call")) > 1, within_s=30)
    driver.hang_up()
    assert driver.wait(within_s=20) != 0
    assert len(model.calls) < 200


def test_driver_that_is_killed_leaves_no_result(start: Start) -> None:
    """SIGKILL from the agent's own cell: the signal tells, and what was recorded stays."""
    driver = start("crash")
    assert driver.wait() == -signal.SIGKILL
    assert driver.of("tool_call")
    assert not driver.of("result")


def test_driver_says_what_could_not_be_built(start: Start, model: ScriptedModel) -> None:
    """An agent class that is not there is a set-up failure, and no call is made."""
    driver = start(options={"agent_class": "nooa_bench.bench_agent:NoSuchAgent"})
    assert driver.wait() == 1
    assert driver.result["status"] == "setup_failed"
    assert "NoSuchAgent" in driver.result["detail"]
    assert model.calls == []


def test_driver_passes_model_parameters_on(start: Start, model: ScriptedModel) -> None:
    """What the session asks of the model is in every call, and reasoning is replayed when it asks for that."""
    options = {
        "model_parameters": {"temperature": 0.25, "max_output_tokens": 512},
        "replay_reasoning": True,
        "context_window": 9000,
    }
    driver = start(options=options)
    assert driver.wait() == 0
    bodies = [call.body for call in model.calls]
    assert all(isinstance(body, dict) and (body["temperature"], body["max_output_tokens"]) == (0.25, 512) for body in bodies)
    assert isinstance(bodies[-1], dict)
    assert [item["id"] for item in bodies[-1]["input"] if item.get("type") == "reasoning"] == ["rs_0000"]


def test_drivers_run_side_by_side(start: Start) -> None:
    """Sessions on one model do not know of each other."""
    drivers = [start("look-around", api=api) for api in DIALECTS * 2]
    assert [driver.wait() for driver in drivers] == [0] * 4
    assert {len(driver.of("model_call")) for driver in drivers} == {2}


@pytest.mark.parametrize(
    ("options", "api", "word"),
    [
        ({"agent_clas": "a:B"}, "responses", "agent_clas"),
        ({"agent_class": "a"}, "responses", "module:Class"),
        ({"context_window": True}, "responses", "int"),
        ({"model_parameters": []}, "responses", "dict"),
        ({}, "completions", "model api"),
    ],
)
def test_nooa_refuses_a_request_that_makes_no_sense(options: dict[str, object], api: str, word: str) -> None:
    """Before anything is started, and with the reason."""
    model = Model(url="http://model/v1", name="m", api=api)
    request = Request(session_id="s", agent="nooa", workdir="/w", prompt="p", model=model, options=options)
    with pytest.raises(ValueError, match=word):
        nooa.launch(request, SessionPaths("/s"), RuntimePaths("/r", "0" * 64))
    with pytest.raises(ValueError, match="found no model"):
        nooa.launch(replace(request, model=None), SessionPaths("/s"), RuntimePaths("/r", "0" * 64))


def test_nooa_is_started_isolated() -> None:
    """Our own interpreter, -I, and no prompt in argv."""
    model = Model(url="http://model/v1", name="m")
    request = Request(session_id="s", agent="nooa", workdir="/w", prompt="secret prompt", model=model)
    launch = get("nooa").launch(request, SessionPaths("/s"), RuntimePaths("/r", "a" * 64))
    assert launch.argv[0] == f"/r/{'a' * 16}/python/bin/python3"
    assert (launch.argv[1], launch.interpreter, launch.parser) == ("-I", True, None)
    assert not any("secret" in part for part in launch.argv)
    assert os.environ.get("OTLP_ENDPOINT") is None
