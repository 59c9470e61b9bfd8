# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Functions of a real server as methods of the real BenchAgent, in the real driver."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from artifacts_fixtures import runtime_tree
from counter_server import TOOLS, CounterServer
from scripted_model import ScriptedModel
from test_nooa_driver import Start, model, repo, start

from boxstrap.runner.wire import ToolAccess

__all__ = ["model", "repo", "runtime_tree", "start"]


def refused() -> str:
    """Return a URL at which nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


def test_functions_are_methods_and_every_call_is_told(start: Start, model: ScriptedModel) -> None:
    """State, cookies, headers and order are the server's own; wrong arguments come back to the model and go nowhere."""
    with CounterServer() as counter:
        driver = start("count", tool_accesses=[counter.access()])
        assert driver.wait() == 0, driver.output.read_text()
    assert driver.result["status"] == "completed"
    assert counter.overlaps == 0
    assert counter.counters == {"seeded": 8}
    assert {(call["grant"], call["cookies"]["session"]) for call in counter.calls} == {("g", "seeded")}
    assert [call["cookies"].get("seen") for call in counter.calls] == [None, "1", "2", "3", "4", "5", "6"]

    shown = driver.of("python_execution")[-1]["stdout"].splitlines()
    assert shown[0] == "{'count': 2}"
    assert "Invalid arguments for increment" in shown[1]
    assert "'two'" in shown[1]
    assert shown[2] == "[{'count': 3}, {'count': 4}, {'count': 4}]"
    assert shown[4] == "{'count': 8} out of order"

    calls = driver.of("resource_call")
    cell = driver.of("python_execution")[-1]
    assert [(call["tool_name"], call["status"], call.get("error_type")) for call in calls] == [
        ("increment", "completed", None),
        ("increment", "failed", "invalid_arguments"),
        ("increment", "completed", None),
        ("increment", "completed", None),
        ("read", "completed", None),
        ("increment", "completed", None),
        ("increment", "completed", None),
        ("broken", "failed", "http_500"),
    ]
    assert {call["parent_tool_call_id"] for call in calls} == {cell["tool_call_id"]}
    assert {call["parent_execution_id"] for call in calls} == {cell["execution_id"]}
    assert {call["invocation_id"] for call in calls} == {cell["invocation_id"]}
    assert (
        calls[2]["started_at"] <= calls[3]["started_at"] < calls[2]["completed_at"]
    )  # they overlapped, and were served in turn
    assert len({call["call_id"] for call in calls}) == len(calls)
    assert calls[5]["arguments"] == {"by": 3, "note": "positional"}
    assert calls[6]["arguments"] == {"by": 1}

    jar = Path(driver.home.parent, "session", "resources_cookies.json")
    assert json.loads(jar.read_text()) == {"counter.direct_http": {"session": "seeded", "seen": "6"}}
    assert jar.stat().st_mode & 0o777 == 0o600
    assert all("increment" in json.dumps(call.body) for call in model.calls)  # the model is told of them


@pytest.mark.parametrize("script", ["count", "count-on"])
def test_required_server_that_is_lost_fails_the_session(start: Start, model: ScriptedModel, script: str) -> None:
    """No cell can catch it, and the model is not asked again: the outcome is the resource's."""
    driver = start(script, tool_accesses=[ToolAccess(name="counter", base_url=refused(), tools=TOOLS)])
    assert driver.wait() == 1
    assert driver.result["status"] == "resource_failed", driver.result
    assert "cannot be reached: ConnectError" in driver.result["detail"]
    assert "tried 3 times" in driver.result["detail"]
    assert [call["error_type"] for call in driver.of("resource_call")] == ["unreachable"]
    assert len(model.calls) == 1


def test_optional_server_that_is_lost_is_a_gap(start: Start) -> None:
    """The model is told, and may go on without."""
    access = ToolAccess(name="counter", base_url=refused(), tools=TOOLS, required=False)
    driver = start("count", tool_accesses=[access])
    assert driver.wait() == 0, driver.result
    assert "counter cannot be reached" in driver.of("python_execution")[-1]["stdout"]
    assert "resource_unavailable" in [gap["code"] for gap in driver.of("gap")]


def test_two_servers_have_jars_of_their_own(start: Start) -> None:
    renamed = [{**TOOLS[0], "name": "second"}]
    with CounterServer() as one, CounterServer() as two:
        accesses = [one.access(), two.access(name="other", tools=renamed, cookies={"session": "mine"})]
        driver = start("count", tool_accesses=accesses)
        assert driver.wait() == 0, driver.result
    assert two.calls == []
    jar = json.loads(Path(driver.home.parent, "session", "resources_cookies.json").read_text())
    assert jar["other"] == {"session": "mine"}


def tool(**fields: Any) -> dict[str, Any]:
    """Return a tool that is fine but for these fields."""
    return {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, **fields}


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ([tool(type="web_search")], "needed function"),
        ([tool(name="_private")], "public Python identifier"),
        ([tool(name="not a name")], "public Python identifier"),
        ([tool(name="class")], "public Python identifier"),
        ([tool(), tool()], "has that name already"),
        ([tool(name="shell")], "has that name already"),
        ([tool(name="event_manager")], "name"),
        ([tool(parameters={"type": "array"})], "object schema"),
        ([tool(parameters={"type": "object", "properties": {"x": {"type": "no type"}}})], "no JSON Schema"),
        ([tool(parameters={"type": "object", "properties": {"a-b": {}}})], "parameter named 'a-b'"),
    ],
)
def test_tool_that_cannot_be_a_method_is_refused(
    start: Start, model: ScriptedModel, wrong: list[dict[str, object]], word: str
) -> None:
    """Before the first model call, with what was found."""
    driver = start(tool_accesses=[ToolAccess(name="x", base_url="http://x", tools=wrong)])
    assert driver.wait() == 1
    assert driver.result["status"] == "setup_failed"
    assert word in driver.result["detail"]
    assert model.calls == []
