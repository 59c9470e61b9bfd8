# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What pool's and OpenCode's output becomes, line by line, and how the stand-in for pool takes what our module writes."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sample_repo import make_sample_repo
from scripted_model import ScriptedModel

from boxstrap.runner import agents
from boxstrap.runner.agents import UnusableError, command, opencode, pool
from boxstrap.runner.layout import RuntimePaths, SessionPaths
from boxstrap.runner.wire import Kind, Model, Outcome, Request

FAKE_POOL = Path(__file__).parent / "children" / "fake_pool.py"
Data = list[tuple[Kind, dict[str, Any]]]


def parsed(parser: agents.Parser, *lines: object) -> Data:
    """Feed lines: bytes as they are, all else as JSON."""
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return [(kind, dict(data)) for line in raw for kind, data in parser.feed(line)]


def request(agent: str, **fields: Any) -> Request:
    """Make a request of an agent that speaks chat completions."""
    model = Model(url="http://127.0.0.1:9/v1", name="m", api="chat")
    return Request(**{"session_id": "s", "agent": agent, "workdir": "/w", "prompt": "--p é", "model": model, **fields})


@pytest.fixture
def session(tmp_path: Path) -> SessionPaths:
    """A session's folder, with its HOME and tmp."""
    paths = SessionPaths(str(tmp_path))
    for folder in (paths.home, paths.tmp):
        Path(folder).mkdir()
    return paths


@pytest.fixture
def runtime(tmp_path: Path) -> RuntimePaths:
    """A published runtime whose bin/pool is the stand-in."""
    paths = RuntimePaths(str(tmp_path), "0" * 64)
    binary = Path(paths.site, "bin", "pool")
    binary.parent.mkdir(parents=True)
    binary.symlink_to(FAKE_POOL)
    return paths


def test_pool_results_come_in_the_order_of_the_calls() -> None:
    calls = [{"type": "toolCall", "name": name, "args": {"n": name}} for name in ("read", "shell", "edit")]
    results = [{"type": "toolCallResult", "result": "r"}, {"type": "toolCallResult", "entries": ["a", "b"]}]
    events = parsed(pool.Events(), *calls, *results, {"type": "toolCallResult", "err": "no such file"})
    assert [data["tool_call_id"] for _, data in events] == ["call_0001", "call_0002", "call_0003"] * 2
    assert [data["tool_name"] for _, data in events] == ["read", "shell", "edit"] * 2
    told = [(data["output"], data["status"]) for kind, data in events if kind is Kind.TOOL_RESULT]
    assert told == [("r", "completed"), ("a\nb", "completed"), ("no such file", "failed")]


def test_pool_call_without_an_answer_is_incomplete_at_the_end() -> None:
    parser = pool.Events()
    parsed(parser, {"type": "toolCall", "name": "shell", "args": {}}, {"type": "toolCall", "name": "read", "args": {}})
    parsed(parser, {"type": "toolCallResult", "result": "r"})
    (left,) = parser.finish(None).events
    assert left == (
        Kind.TOOL_RESULT,
        {"tool_call_id": "call_0002", "tool_name": "read", "output": "", "status": "incomplete"},
    )


def test_pool_thought_is_text_only_where_it_repeats_no_reasoning() -> None:
    events = parsed(
        pool.Events(),
        {"type": "reasoning", "reasoning": "think"},
        {"type": "thought", "thought": "think"},
        {"type": "thought", "thought": "an older version speaks"},
        {"type": "assistantMessage", "message": " \n"},
        {"type": "assistantMessage", "message": "done"},
    )
    assert [(kind, data["text"]) for kind, data in events] == [
        (Kind.REASONING, "think"),
        (Kind.MESSAGE, "an older version speaks"),
        (Kind.MESSAGE, "done"),
    ]


@pytest.mark.parametrize("parser", [pool.Events(), opencode.Events()])
@pytest.mark.parametrize(
    "line",
    [b"not json", b"[1]", b"\xff\xfe", b'{"type":"fromTheFuture","x":1}', b"{}", b"null", b'{"type":["list"]}', b"[" * 100000],
)
def test_line_that_nobody_understands_is_kept_and_named(parser: agents.Parser, line: bytes) -> None:
    (log, gap) = parsed(parser, line)
    assert (log[0], gap) == (Kind.LOG, (Kind.GAP, {"code": "unknown_event", "bytes": len(line)}))
    assert log[1]["text"].encode("utf-8", "replace")[:5] == line.decode("utf-8", "replace").encode()[:5]


def test_pool_login_is_the_end() -> None:
    with pytest.raises(UnusableError, match="browser login"):
        parsed(pool.Events(), {"type": "oauth_url", "url": "https://login.invalid"})


@pytest.mark.parametrize(("code", "outcome"), [(0, None), (4, Outcome.GAVE_UP), (1, Outcome.AGENT_FAILED), (None, None)])
def test_pool_exit_code_is_read(code: int | None, outcome: Outcome | None) -> None:
    parser = pool.Events()
    parsed(parser, {"error": "what went wrong"})
    end = parser.finish(code)
    assert (end.outcome, end.detail) == (outcome, "what went wrong")


def test_opencode_tells_a_failed_model_from_a_failed_agent() -> None:
    parser = opencode.Events()
    parsed(parser, {"type": "error", "error": {"name": "APIError", "data": {"message": "no", "statusCode": 401}}})
    assert parser.finish(1).outcome is Outcome.MODEL_FAILED
    parser = opencode.Events()
    parsed(parser, {"type": "error", "error": {"name": "UnknownError", "data": {"message": "no"}}})
    assert parser.finish(1).outcome is Outcome.AGENT_FAILED
    assert opencode.Events().finish(0).outcome is None


def test_opencode_tool_use_is_call_and_result() -> None:
    state = {"status": "error", "input": {"command": "x"}, "error": "denied"}
    event = {"type": "tool_use", "part": {"tool": "bash", "callID": "c1", "state": state}}
    (call, result) = parsed(opencode.Events(), event)
    assert call == (Kind.TOOL_CALL, {"tool_call_id": "c1", "tool_name": "bash", "arguments": {"command": "x"}})
    assert result[1] == {"tool_call_id": "c1", "tool_name": "bash", "output": "denied", "status": "failed"}


def test_pool_config_follows_the_window_and_the_users_word_is_last(session: SessionPaths, runtime: RuntimePaths) -> None:
    options = {"context_window": 1000, "config": {"max_steps": 7, "tools": {"read": {"max_lines": 9}}}}
    launch = pool.launch(request("pool", options=options), session, runtime)
    config = json.loads(Path(session.tmp, "pool.json").read_text(encoding="utf-8"))
    compact = {"TriggerCompressionTokenCount": 800, "MaxSummarizeTokenCount": 700, "MinRetainedSteps": 5}
    assert config["memory"]["compact"] == compact
    assert config["max_steps"] == 7
    assert config["tools"]["read"] == {"max_lines": 9, "line_num_separator": "|◊|"}
    assert "--p é" not in launch.argv
    assert Path(launch.argv[launch.argv.index("-f") + 1]).read_text(encoding="utf-8") == "--p é"
    assert {path.stat().st_mode & 0o777 for path in Path(session.tmp).iterdir()} == {0o600}


def test_opencode_finds_what_it_would_fetch(session: SessionPaths, runtime: RuntimePaths) -> None:
    """Without ripgrep in its cache, grep and glob fail in a box without network; without node_modules, it runs npm install."""
    ripgrep = Path(runtime.site, "bin", "rg")
    ripgrep.write_text("")
    options = {"config": {"share": "manual", "provider": {"gym": {"options": {"timeout": 1}}}}}
    launch = opencode.launch(request("opencode", options=options), session, runtime)
    assert Path(session.home, ".cache", "opencode", "bin", "rg").resolve() == ripgrep.resolve()
    assert Path(session.home, ".config", "opencode", "node_modules").is_dir()
    config = json.loads(launch.env["OPENCODE_CONFIG_CONTENT"])
    assert (config["model"], config["share"], config["autoupdate"]) == ("gym/m", "manual", False)
    assert config["provider"]["gym"]["options"]["timeout"] == 1
    assert config["provider"]["gym"]["options"]["baseURL"] == "http://127.0.0.1:9/v1"
    assert Path(launch.stdin).read_text(encoding="utf-8") == "--p é"
    assert "--p é" not in launch.argv


@pytest.mark.parametrize("agent", ["pool", "opencode"])
@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"model": None}, "no model"),
        ({"options": {"contextwindow": 1}}, "contextwindow"),
        ({"options": {"context_window": "1"}}, "needed int"),
        ({"options": {"context_window": True}}, "needed int"),
        ({"options": {"config": []}}, "needed dict"),
        ({"model": Model(url="http://x/v1", name="m", api="messages")}, "needed chat"),
    ],
)
def test_request_that_makes_no_sense_is_refused(
    session: SessionPaths, runtime: RuntimePaths, agent: str, fields: dict[str, Any], word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        agents.get(agent).launch(request(agent, **fields), session, runtime)


@pytest.mark.parametrize("name", ["nobody", "json-lines", "driver", "../pool", "", "event-writer"])
def test_agent_that_there_is_not_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="there is no agent"):
        agents.get(name)


def test_command_keeps_each_line() -> None:
    assert parsed(command.Lines(), b"a\xff") == [(Kind.LOG, {"stream": "stdout", "text": "a\ufffd"})]


def run_stand_in(launch: agents.Launch, workdir: Path, session: SessionPaths, **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run the stand-in as the supervisor would."""
    told = {"PATH": os.environ["PATH"], "HOME": session.home, **launch.env, **env}
    return subprocess.run(
        launch.argv, cwd=workdir, env=told, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )


def test_stand_in_takes_what_the_module_writes_and_repairs_the_repo(
    session: SessionPaths, runtime: RuntimePaths, tmp_path: Path
) -> None:
    """It also prints a line of a version to come, which costs a gap and no more."""
    repo = tmp_path / "repo"
    make_sample_repo(repo)
    with ScriptedModel() as model:
        wanted = request("pool", model=Model(url=model.url, name="m", api="chat"))
        launch = pool.launch(wanted, session, runtime)
        done = run_stand_in(launch, repo, session, FAKE_POOL_LINE='{"type":"fromTheFuture"}')
        sent = model.calls[-1].body
    assert done.returncode == 0, done.stdout
    assert isinstance(sent, dict)
    assert sent["tools"][0]["cache_control"] == {"type": "ephemeral"}
    events = parsed(pool.Events(), *done.stdout.splitlines())
    assert [data["code"] for kind, data in events if kind is Kind.GAP] == ["unknown_event"]
    assert [kind for kind, _ in events if kind in {Kind.TOOL_CALL, Kind.TOOL_RESULT}] == [Kind.TOOL_CALL, Kind.TOOL_RESULT] * 3
    assert subprocess.run(["git", "diff", "--quiet"], cwd=repo, check=False).returncode == 1


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"argv": "--yolo"}, b"unrecognized arguments"),
        ({"config": {"max_stepz": 1}}, b"max_stepz"),
        ({"config": {"max_steps": "1"}}, b"config.max_steps"),
        ({"config": {"memory": None}}, b"config.memory"),
    ],
)
def test_stand_in_refuses_what_pool_would_not_take(
    session: SessionPaths, runtime: RuntimePaths, tmp_path: Path, change: dict[str, Any], word: bytes
) -> None:
    options = {"config": change["config"]} if "config" in change else {"args": [change["argv"]]}
    launch = pool.launch(request("pool", options=options), session, runtime)
    done = run_stand_in(launch, tmp_path, session)
    assert done.returncode not in {0, 4}
    assert word in done.stdout + done.stderr


def test_stand_in_without_a_key_asks_for_a_login(session: SessionPaths, runtime: RuntimePaths, tmp_path: Path) -> None:
    launch = replace(pool.launch(request("pool"), session, runtime), env={})
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        subprocess.run(launch.argv, cwd=tmp_path, env={"PATH": os.environ["PATH"]}, capture_output=True, timeout=2, check=True)
    assert json.loads((caught.value.stdout or b"").splitlines()[0])["type"] == "oauth_url"
