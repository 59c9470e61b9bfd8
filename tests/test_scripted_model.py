# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The scripted stand-in for a model: deterministic, stateless per conversation, and able to fail in every way."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from model_scripts import SCRIPTS, turns_of
from sample_repo import HEAD, make_sample_repo
from scripted_model import Fault, ScriptedModel

TOOLS = {
    "chat/completions": [
        {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("execute_python", "return_result")
    ],
    "responses": [{"type": "function", "name": name, "parameters": {}} for name in ("execute_python", "return_result")],
}
DIALECTS = list(TOOLS)


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    """A strict one with the default script."""
    with ScriptedModel(strict=True) as model:
        yield model


def first_body(dialect: str) -> dict[str, Any]:
    """Return the body of a conversation's first request."""
    start = [{"role": "user", "content": "fix it"}]
    return {"model": "m", "tools": TOOLS[dialect], "input" if dialect == "responses" else "messages": start}


def next_body(dialect: str, body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the request that follows a reply."""
    if dialect == "responses":
        calls = [item for item in reply["output"] if item["type"] == "function_call"]
        outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": "ok"} for call in calls]
        return {**body, "input": [*body["input"], *reply["output"], *outputs]}
    message = reply["choices"][0]["message"]
    outputs = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in message.get("tool_calls") or []]
    return {**body, "messages": [*body["messages"], message, *outputs]}


def calls_in(dialect: str, reply: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return name and arguments of each tool call in a reply."""
    if dialect == "responses":
        found = [item for item in reply["output"] if item["type"] == "function_call"]
    else:
        found = [call["function"] for call in reply["choices"][0]["message"].get("tool_calls") or []]
    return [(call["name"], json.loads(call["arguments"])) for call in found]


def converse(url: str, dialect: str) -> list[tuple[str, dict[str, Any]]]:
    """Hold the conversation of the fix-bug script and return its tool calls."""
    body = first_body(dialect)
    calls: list[tuple[str, dict[str, Any]]] = []
    with httpx.Client() as client:
        while not calls or calls[-1][0] != "return_result":
            response = client.post(f"{url}/{dialect}", json=body)
            assert response.status_code == httpx.codes.OK, response.text
            calls += calls_in(dialect, response.json())
            body = next_body(dialect, body, response.json())
    return calls


@pytest.mark.parametrize("dialect", DIALECTS)
def test_scripted_model_answers_by_the_conversation_alone(model: ScriptedModel, dialect: str) -> None:
    """Many sessions at once get the same turns in the same order, whatever the others do."""
    with ThreadPoolExecutor(16) as pool:
        conversations = list(pool.map(lambda _: converse(model.url, dialect), range(16)))
    expected = [("execute_python", {"code": turn.code}) for turn in turns_of("fix-bug") or [] if not turn.result]
    assert all(calls[:-1] == expected for calls in conversations)
    assert len(model.calls) == 16 * 4


@pytest.mark.parametrize("dialect", DIALECTS)
def test_scripted_model_streams_what_it_answers(model: ScriptedModel, dialect: str) -> None:
    """The parts of a stream add up to the JSON answer."""
    body = first_body(dialect)
    whole = httpx.post(f"{model.url}/{dialect}", json=body).json()
    model.strict = False
    usage = {} if dialect == "responses" else {"stream_options": {"include_usage": True}}
    streamed = httpx.post(f"{model.url}/{dialect}", json={**body, "stream": True, **usage})
    assert streamed.headers["content-type"] == "text/event-stream"
    data = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: ")]
    if dialect == "responses":
        parts = [json.loads(part) for part in data]
        assert parts[-1]["type"] == "response.completed"
        assert parts[-1]["response"]["output"] == whole["output"]
        assert [part["sequence_number"] for part in parts] == list(range(len(parts)))
    else:
        assert data[-1] == "[DONE]"
        chunks = [json.loads(part) for part in data[:-1]]
        delta = chunks[0]["choices"][0]["delta"]["tool_calls"][0]["function"]
        assert delta == whole["choices"][0]["message"]["tool_calls"][0]["function"]
        assert chunks[1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
        assert chunks[2]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_scripted_model_records_any_prefix(model: ScriptedModel) -> None:
    """A path before /v1 is kept in the record, with headers and body."""
    url = model.url.replace("/v1", "/ng-rollout/key/v1")
    httpx.post(f"{url}/responses", json=first_body("responses"), headers={"x-session-id": "s"})
    assert httpx.get(f"{url}/models").json()["data"][0]["object"] == "model"
    recorded = httpx.get(model.url.replace("/v1", "/_requests")).json()
    assert [request["path"] for request in recorded] == ["/ng-rollout/key/v1/responses", "/ng-rollout/key/v1/models"]
    assert recorded[0]["headers"]["x-session-id"] == "s"
    assert recorded[0]["body"]["input"] == [{"role": "user", "content": "fix it"}]


def test_scripted_model_takes_the_script_from_the_model_name(model: ScriptedModel) -> None:
    """One server serves sessions with different scripts."""
    reply = httpx.post(f"{model.url}/responses", json={**first_body("responses"), "model": "chatter:3"}).json()
    assert "echo turn 0" in calls_in("responses", reply)[0][1]["code"]


def test_scripted_model_takes_its_turns_through_a_shell_tool_too(model: ScriptedModel) -> None:
    """An agent that offers `bash` gets the same script as shell commands, and text at the end."""
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
    body = {**first_body("chat/completions"), "tools": tools}
    names = []
    for _ in range(4):
        reply = httpx.post(f"{model.url}/chat/completions", json=body).json()
        names += [name for name, _ in calls_in("chat/completions", reply)]
        body = next_body("chat/completions", body, reply)
    assert names == ["bash"] * 3
    assert reply["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("dialect", "change", "objection"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "x", "cache_control": {}}]}, "cache_control"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"text": "x", "cache_control": {}}]}]},
            "cache_control",
        ),
        ("chat/completions", {"cache_control": {}}, "cache_control"),
        ("chat/completions", {"stream": True}, "stream"),
        ("responses", {"stream": True}, "stream"),
        ("responses", {"litellm_call_id": "k"}, "litellm_call_id"),
        ("responses", {"input": [{"type": "reasoning", "summary": []}]}, "needed"),
        ("responses", {"input": [{"type": "strange"}]}, "known type"),
    ],
)
def test_scripted_model_refuses_what_gym_refuses(
    model: ScriptedModel, dialect: str, change: dict[str, Any], objection: str
) -> None:
    """A strict server answers 422 and says why."""
    response = httpx.post(f"{model.url}/{dialect}", json={**first_body(dialect), **change})
    assert response.status_code == 422
    assert objection in response.json()["error"]["message"]


@pytest.mark.parametrize(("spec", "status"), [("500", 500), ("429=7", 429), ("401", 401), ("400", 400), ("context", 400)])
def test_scripted_model_fails_as_told_and_recovers(model: ScriptedModel, spec: str, status: int) -> None:
    """A fault lasts for its number of calls; it can be set while the server runs."""
    httpx.post(model.url.replace("/v1", "/_faults"), json=[f"{spec}:2"])
    answers = [httpx.post(f"{model.url}/responses", json=first_body("responses")) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [status, status, 200]
    assert answers[0].headers.get("retry-after") == ("7" if "=" in spec else None)


def test_scripted_model_breaks_and_hangs_and_babbles(model: ScriptedModel) -> None:
    """The faults that no status code tells."""
    url, body = f"{model.url}/responses", first_body("responses")
    model.faults = [Fault.parse("break:1"), Fault.parse("hang:1"), Fault.parse("garbage:1"), Fault.parse("failed:1")]
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(url, json=body)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=body, timeout=0.2)
    with pytest.raises(ValueError, match=r"codec|Expecting"):
        httpx.post(url, json=body).json()
    assert httpx.post(url, json=body).json()["status"] == "failed"
    assert httpx.post(url, json=body).status_code == 200


def test_scripted_model_runs_as_a_program() -> None:
    """Its first line is its URL."""
    command = [sys.executable, str(Path(__file__).with_name("scripted_model.py")), "--script", "chatter:2", "--fault", "503:1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert httpx.post(f"{url}/responses", json=first_body("responses")).status_code == 503
            assert httpx.post(f"{url}/responses", json=first_body("responses")).status_code == 200
        finally:
            process.terminate()


def test_scripts_and_faults_refuse_what_they_do_not_know() -> None:
    """A typo is an error at once, not a script that does nothing."""
    assert all(turns_of(name) for name in SCRIPTS)
    with pytest.raises(ValueError, match="there is no script"):
        ScriptedModel("fix-bgu")
    with pytest.raises(ValueError, match="there is no fault"):
        Fault.parse("hagn")


def test_sample_repo_is_the_same_each_time(tmp_path: Path) -> None:
    """Its commit id is known, its tree is clean, and its tests fail by the bug and nothing else."""
    assert make_sample_repo(tmp_path / "one") == make_sample_repo(tmp_path / "two") == HEAD
    run = partial(subprocess.run, cwd=tmp_path / "one", capture_output=True, text=True, check=False)
    assert run(["git", "status", "--porcelain", "--ignored"]).stdout == ""
    tests = run([sys.executable, "-B", "-m", "unittest"])
    assert "FAILED (failures=1)" in tests.stderr
    assert "999 != 1000" in tests.stderr
