# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Evidence in the shapes of others, judged by their own models: nemo-gym's Response and observations, harbor's ATIF."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from artifacts_fixtures import runtime_tree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_repo import PROMPT, make_sample_repo
from scripted_model import ScriptedModel
from shapes import Validate, validate

from boxstrap.controller import cli
from boxstrap.controller.collect import read_events
from boxstrap.controller.convert import TARGETS, Story, story_in, story_of, to_atif, to_observations, to_responses
from boxstrap.controller.sandboxes.local import LocalSandbox
from boxstrap.controller.session import SessionSpec, open_session
from boxstrap.runner.evidence import EvidenceLog
from boxstrap.runner.wire import Event, Kind, Model, Outcome

__all__ = ["runtime_tree", "validate"]


async def _run(folder: Path, name: str, *, script: str, api: str, repo: Path, **more: Any) -> Path:
    """Run a whole session of the real NOOA on this machine and return its folder on the host."""
    with ScriptedModel(strict=True) as model:
        spec = SessionSpec(
            session_id=name,
            agent="nooa",
            workdir=str(repo),
            out=folder / name,
            model=Model(url=model.url, name=script, api=api),
            **more,
        )
        async with open_session(LocalSandbox(folder / "box"), spec) as session:
            await session.invoke(spec.request(PROMPT))
    return folder / name


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Real sessions: the same one twice, the other dialect, one with subagents and a summarizer, and one that is cut short."""
    folder = tmp_path_factory.mktemp("sessions")
    told: dict[str, Path] = {}
    for name, script, api, more in (
        ("first", "fix-bug", "responses", {}),
        ("again", "fix-bug", "responses", {}),
        ("chat", "fix-bug", "chat", {}),
        ("delegate", "delegate", "responses", {}),
        ("budget", "chatter", "chat", {"max_policy_calls": 2}),
    ):
        repo = folder / f"repo-{script}" / "bills"  # the same place: a path is neither a time nor an id
        for file in sorted(repo.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()
        make_sample_repo(repo)
        told[name] = asyncio.run(_run(folder, name, script=script, api=api, repo=repo, **more))
    return told


_ID = re.compile(r"(?<![0-9a-zA-Z])(?:0x)?[0-9a-f]{8,64}\b(?:-[0-9a-f]{4,12}\b)*")
_MEASURED = re.compile(r"\d+(?:\.\d+)? ?(?:s|MiB|CPU seconds)\b|\d{4}-\d\d-\d\dT[\d:.]+")
_TIMES = {"started_at", "completed_at", "created_at", "observed_at", "seconds", "ttfb_seconds", "duration_ms", "pid"}
_TIMES |= {"wall_time_s", "cpu_time_s", "cpu_seconds", "peak_rss_bytes"}  # what a run cost is no part of what it did


def same_but_for_times_and_ids(value: object) -> object:
    """Return plain data with each time gone and each id replaced by how many came before it."""
    names: dict[str, str] = {}

    def plain(value: object, key: str = "") -> object:
        if isinstance(value, dict):
            return {name: plain(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [plain(item) for item in value]
        if isinstance(value, str):
            text = _ID.sub(lambda found: names.setdefault(found.group(), f"<{len(names)}>"), value)
            return _MEASURED.sub("<measured>", text)
        return "<time>" if key in _TIMES else value

    return plain(value)


def test_same_session_run_twice_leaves_the_same_evidence(sessions: dict[str, Path]) -> None:
    """Every event, payloads included, but for times and ids; another dialect is told apart."""
    told: dict[str, Any] = {}
    for name in ("first", "again", "chat"):
        events = read_events(sessions[name] / "evidence.ndjson")
        by_kind = sorted(((event.kind, event.data) for event in events), key=lambda event: event[0])  # one pipe has one order
        told[name] = same_but_for_times_and_ids([list(event) for event in by_kind if event[0] != Kind.HEARTBEAT])
    assert len(told["first"]) > 15
    assert told["first"] == told["again"]
    assert told["first"] != told["chat"]


@pytest.mark.parametrize("target", TARGETS)
def test_same_session_run_twice_has_the_same_shapes(sessions: dict[str, Path], target: str) -> None:
    first, again = (story_in(sessions[name]) for name in ("first", "again"))
    again.session_id = first.session_id
    assert same_but_for_times_and_ids(TARGETS[target](first)) == same_but_for_times_and_ids(TARGETS[target](again))


@pytest.mark.parametrize("name", ["first", "chat", "delegate", "budget"])
@pytest.mark.parametrize("target", TARGETS)
def test_real_session_is_valid_in_every_shape(sessions: dict[str, Path], validate: Validate, name: str, target: str) -> None:
    told = TARGETS[target](story_in(sessions[name]))
    said = validate(target, told)["said"]
    assert "agent_reported" in json.dumps(told)
    assert "agent_reported" in json.dumps(said)


@pytest.mark.parametrize("name", ["first", "chat"])
def test_responses_hold_what_the_model_wrote_and_what_came_of_it(
    sessions: dict[str, Path], validate: Validate, name: str
) -> None:
    """NOOA's own first cell, then each turn's call and result, then the returned value as the last message."""
    told: Any = to_responses(story_in(sessions[name]))
    kinds = [item["type"] for item in told["output"]]
    pair = ["function_call", "function_call_output"]
    assert kinds == [*pair, "reasoning", *pair * 4, "message"]
    calls = [item for item in told["output"] if item["type"] == "function_call"]
    assert [item["name"] for item in calls] == ["execute_python"] * 4 + ["return_result"]
    assert [item["call_id"] for item in calls[1:]] == [f"call_turn_{turn:04d}" for turn in range(4)]
    results = {item["call_id"]: item for item in told["output"] if item["type"] == "function_call_output"}
    assert "Ran 3 tests" in results["call_turn_0002"]["output"]
    assert json.loads(told["output"][-1]["content"][0]["text"])["command_to_verify"] == "python3 -m unittest -q"
    assert (told["status"], told["error"], told["metadata"]["outcome"]) == ("completed", None, "completed")
    usage = told["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 4000
    assert validate("responses", told)["kinds"][-1] == "NeMoGymResponseOutputMessage"


def test_observations_hold_owners_times_and_the_gap_of_the_returned_value(
    sessions: dict[str, Path], validate: Validate
) -> None:
    told: Any = to_observations(story_in(sessions["first"]), model_ref="policy", sandbox_id="box")
    kinds = validate("observations", told)["kinds"]
    assert kinds == ["AgentInvocation"] + ["ToolCallObservation"] * 5 + ["SandboxObservation"]
    root, *tools, sandbox = told["records"]
    assert (root["status"], root["conversation"][0]["role"], len(root["model_calls"])) == ("completed", "system", 4)
    assert {tool["invocation_id"] for tool in tools} == {root["invocation_id"]}
    assert all(tool["status"] == "completed" and tool["completed_at"] >= tool["started_at"] for tool in tools)
    assert (sandbox["outcome"], sandbox["exit_code"], sandbox["sandbox_id"]) == ("completed", 0, "box")
    assert [gap["code"] for gap in told["gaps"]] == ["non_trainable_terminal_output"]


def test_observations_without_a_model_server_say_that_calls_have_no_owner(sessions: dict[str, Path]) -> None:
    told: Any = to_observations(story_in(sessions["first"]))
    assert told["records"][0]["model_calls"] == []
    assert "model_call_ownership_unavailable" in [gap["code"] for gap in told["gaps"]]


def test_observations_of_subagents_are_a_tree(sessions: dict[str, Path]) -> None:
    """The title's and the summarizer's calls are not the root's, and each compaction is told."""
    told: Any = to_observations(story_in(sessions["delegate"]), model_ref="policy")
    invocations = {one["invocation_id"]: one for one in told["records"] if one["kind"] == "agent_invocation"}
    parents = {one.get("parent_invocation_id") for one in invocations.values()}
    assert len(invocations) > 2
    assert parents - {None} <= set(invocations)
    assert sum(len(one["model_calls"]) for one in invocations.values()) > len(told["records"][0]["model_calls"])
    assert any(record["kind"] == "context_compaction" for record in told["records"])


def test_budget_that_ran_out_is_partial_in_every_shape(sessions: dict[str, Path]) -> None:
    story = story_in(sessions["budget"])
    responses: Any = to_responses(story)
    observations: Any = to_observations(story, model_ref="policy")
    atif: Any = to_atif(story)
    assert (responses["status"], responses["metadata"]["outcome"]) == ("incomplete", "policy_budget_exhausted")
    assert "policy_budget_exceeded" in [gap["code"] for gap in observations["gaps"]]
    assert (observations["records"][0]["status"], atif["extra"]["outcome"]) == ("incomplete", "policy_budget_exhausted")
    assert atif["final_metrics"]["extra"]["model_calls"] == 2


def test_atif_has_a_step_for_each_answer_and_none_for_what_was_no_answer(sessions: dict[str, Path]) -> None:
    told: Any = to_atif(story_in(sessions["first"]))
    steps = told["steps"]
    assert (steps[0]["source"], steps[0]["message"]) == ("user", PROMPT)
    assert [step.get("llm_call_count") for step in steps[1:]] == [0, 1, 1, 1, 1, 0]
    assert steps[2]["reasoning_content"] == "The shares do not add up: first see the code."
    assert "Ran 3 tests" in steps[4]["observation"]["results"][0]["content"]
    total = sum(step["metrics"]["prompt_tokens"] for step in steps if "metrics" in step)
    assert told["final_metrics"]["total_prompt_tokens"] == total
    assert (told["agent"]["name"], told["extra"]["provenance"]) == ("nooa", "agent_reported")


def test_command_prints_a_session_in_a_shape(sessions: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", "--to", "atif", str(sessions["first"])]) == 0
    assert json.loads(capsys.readouterr().out)["session_id"] == "first"
    assert cli.main(["convert", "--to", "atif", str(sessions["first"] / "nothing")]) == 64


def events_of(*said: tuple[Kind, dict[str, object]]) -> list[Event]:
    """Return events as a supervisor stamps them."""
    return [
        Event(seq=at, t=1_700_000_000.0 + at, mono=float(at), kind=kind, data=data) for at, (kind, data) in enumerate(said, 1)
    ]


OPAQUE = events_of(
    (Kind.AGENT_STARTED, {"agent": "pool"}),
    (
        Kind.MODEL_CALL,
        {"seq": 1, "model": "m", "status": 200, "error": None, "response_id": "r1", "usage": {"input_tokens": 5}},
    ),
    (Kind.REASONING, {"text": "look first"}),
    (Kind.MESSAGE, {"role": "assistant", "text": "I look."}),
    (Kind.TOOL_CALL, {"tool_call_id": "1", "tool_name": "shell", "arguments": {"command": "ls"}}),
    (Kind.TOOL_CALL, {"tool_call_id": "2", "tool_name": "read", "arguments": '{"path": "a"}'}),
    (Kind.TOOL_RESULT, {"tool_call_id": "1", "tool_name": "shell", "output": "a", "status": "completed"}),
    (Kind.TOOL_RESULT, {"tool_call_id": "2", "tool_name": "read", "output": "no", "status": "failed"}),
    (Kind.MODEL_CALL, {"seq": 2, "model": "m", "status": 500, "error": "http", "usage": None}),
    (Kind.TOOL_CALL, {"tool_call_id": "3", "tool_name": "shell", "arguments": "no JSON"}),
    (Kind.AGENT_EXITED, {"status": "", "exit_code": None}),
)


def test_opaque_agent_is_told_from_its_own_events(validate: Validate) -> None:
    """No invocations, no whole replies; a call that never ended stays open in every shape."""
    story = story_of(OPAQUE)
    told: dict[str, Any] = {target: shape(story) for target, shape in TARGETS.items()}
    for target, value in told.items():
        validate(target, value)
    kinds = [item["type"] for item in told["responses"]["output"]]
    assert kinds == ["reasoning", "message", *["function_call"] * 2, *["function_call_output"] * 2, "function_call"]
    assert [item["status"] for item in told["responses"]["output"][4:6]] == ["completed", "incomplete"]
    tools = [record for record in told["observations"]["records"] if record["kind"] == "tool_call"]
    assert [(tool["status"], tool["invocation_id"]) for tool in tools] == [
        ("completed", "root"),
        ("failed", "root"),
        ("incomplete", "root"),
    ]
    steps = told["atif"]["steps"]
    assert [call["function_name"] for call in steps[0]["tool_calls"]] == ["shell", "read"]
    assert steps[1]["tool_calls"][0]["arguments"] == {"arguments": "no JSON"}
    assert told["atif"]["final_metrics"]["extra"]["failed_model_calls"] == 1


def test_mute_agent_is_told_from_its_models_replies(validate: Validate) -> None:
    """Whole replies of all three dialects, also with token ids; a clipped one is left out."""
    ids = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}
    text = {"type": "output_text", "text": "hello", "annotations": []}
    replies: list[dict[str, object]] = [
        {"output": [{"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text], **ids}]},
        {
            "choices": [
                {"message": {"content": "two", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}}
            ]
        },
        {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "tool_use", "id": "d", "name": "g", "input": {"x": 1}}]},
        {"clipped": '{"output": [{"ty [...] '},
        {"output": [{"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text"}]}]},
    ]
    calls = [
        (Kind.MODEL_CALL, {"seq": at, "status": 200, "error": None, "response": reply}) for at, reply in enumerate(replies)
    ]
    story = story_of(events_of(*calls))
    told = to_responses(story)
    assert validate("responses", told)["kinds"] == [
        "NeMoGymResponseOutputMessageForTraining",
        "NeMoGymResponseOutputMessage",
        "NeMoGymResponseFunctionToolCall",
        "NeMoGymResponseReasoningItem",
        "NeMoGymResponseFunctionToolCall",
    ]
    validate("atif", to_atif(story))


def test_opaque_agent_whose_calls_are_the_models_keeps_the_models_items(validate: Validate) -> None:
    """What it tells of itself is the same reply again, so token ids are kept; a reply that it does not tell of is left out."""
    ids = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}
    call = {"type": "function_call", "id": "f", "call_id": "c", "name": "shell", "arguments": "{}", **ids}
    title = [{"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "A title"}]}]
    told = to_responses(
        story_of(
            events_of(
                (Kind.MODEL_CALL, {"seq": 1, "status": 200, "error": None, "response": {"output": title}}),
                (Kind.TOOL_CALL, {"tool_call_id": "c", "tool_name": "shell", "arguments": {}}),
                (Kind.MODEL_CALL, {"seq": 2, "status": 200, "error": None, "response": {"output": [call]}}),
                (Kind.TOOL_RESULT, {"tool_call_id": "c", "tool_name": "shell", "output": "x", "status": "completed"}),
            )
        )
    )
    kinds = validate("responses", told)["kinds"]
    assert kinds == ["NeMoGymResponseFunctionToolCallForTraining", "NeMoGymResponseFunctionCallOutput"]


def test_payload_that_was_too_long_for_its_line_is_part_of_the_story(tmp_path: Path) -> None:
    """It lies beside the evidence, by digest; one that is not there leaves the small fields."""
    log = EvidenceLog(str(tmp_path / "evidence.ndjson"), str(tmp_path / "artifacts"))
    content = [{"type": "output_text", "text": "long " * 100_000}]
    reply = {"output": [{"type": "message", "id": "m", "role": "assistant", "content": content}]}
    log.append(Kind.MODEL_CALL, {"seq": 1, "model": "m", "status": 200, "error": None, "response": reply})
    log.close()
    told: Any = to_responses(story_in(tmp_path))
    (item,) = told["output"]
    assert item["content"] == content
    next((tmp_path / "artifacts").iterdir()).unlink()
    assert to_responses(story_in(tmp_path))["output"] == []
    assert story_in(tmp_path).model == "m"


def test_model_call_that_is_told_late_stands_before_what_came_of_it() -> None:
    """The gateway's pipe is not the agent's: its account of a call may come after the call's tool has begun."""
    call = {"type": "function_call", "id": "f", "call_id": "c", "name": "shell", "arguments": "{}"}
    asked = (
        Kind.MODEL_CALL,
        {"seq": 1, "status": 200, "error": None, "invocation_id": "i", "response": {"output": [call]}},
    )
    begun = (Kind.TOOL_CALL, {"tool_call_id": "c", "tool_name": "shell", "arguments": {}, "invocation_id": "i"})
    ended = (Kind.TOOL_RESULT, {"tool_call_id": "c", "tool_name": "shell", "output": "x", "status": "completed"})
    in_order, late = (
        to_responses(story_of(events_of(*said)))["output"] for said in ((asked, begun, ended), (begun, ended, asked))
    )
    assert in_order == late


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["a", "b", "output_text"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "id", "text", "output"]), inner, max_size=4)
    ),
    max_leaves=6,
)
NAMES = """
    tool_call_id tool_name arguments output status text role final seq model error usage seconds started_at completed_at
    response request invocation_id parent_invocation_id name method code detail result agent exit_code call_id
    parent_tool_call_id
"""
FIELDS = st.sampled_from(NAMES.split())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    said=st.lists(st.tuples(st.sampled_from(list(Kind)), st.dictionaries(FIELDS, JSON, max_size=8)), max_size=12),
    outcome=st.sampled_from([*Outcome, "", "made up"]),
    at=st.floats(),
)
def test_whatever_an_agent_writes_is_valid_in_every_shape(
    validate: Validate, said: list[tuple[Kind, dict[str, object]]], outcome: str, at: float
) -> None:
    """Hostile events lose what does not fit; nothing raises, and no model refuses the rest."""
    events = [replace(event, t=at) for event in events_of(*said)]
    story: Story = story_of(events, result={"outcome": outcome, "receipt": {"exit_code": 1, "started_at": 1.0}})
    for target, shape in TARGETS.items():
        validate(target, shape(story))
