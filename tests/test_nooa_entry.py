# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Agents of one's own, invocation adapters, input of several items: how the real driver enters the real NOOA."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from artifacts_fixtures import runtime_tree
from polling import eventually
from scripted_model import ScriptedModel
from test_nooa_driver import DIALECTS, Start, model, repo, start

from boxstrap.runner.layout import RuntimePaths

__all__ = ["model", "repo", "runtime_tree", "start"]

OWN = '''
"""An agent that is not BenchAgent, as a payload would hold it."""
from nooa import Agent, CodeActStrategy, PredictStrategy, strategy

NOT_ASYNC = lambda agent, request: None

class Greeter(Agent):
    def __init__(self, llm=None, greeting="hello"):
        super().__init__(llm=llm)
        self.greeting = greeting

    @strategy(PredictStrategy())
    async def greet(self, who: str) -> str:
        """Greet who."""
        ...

    @strategy(CodeActStrategy())
    async def work(self, task: str) -> str:
        """Do the task."""
        ...

async def greet(agent, request):
    said = [item["content"] for item in request.input] if isinstance(request.input, list) else [request.input]
    return f"{agent.greeting} {'+'.join(said)} at {request.temperature}: {await agent.greet('you')}"

async def echo(agent, request):
    return await agent.work(request.input)

async def nothing(agent, request):
    return None

async def takes_one(agent):
    return None
'''


def options(**more: Any) -> dict[str, object]:
    """Return the options of the agent of one's own."""
    return {"agent_class": "own_agent:Greeter", "invocation": "own_agent:greet", **more}


@pytest.fixture(scope="module", autouse=True)
def own(runtime_tree: RuntimePaths) -> Iterator[Path]:
    """A module beside NOOA in the payload."""
    path = Path(runtime_tree.site, "own_agent.py")
    path.write_text(OWN)
    yield path
    path.unlink()


def said(role: str, content: object) -> dict[str, object]:
    """Return an input item of the Responses dialect."""
    return {"type": "message", "role": role, "content": content}


def test_own_agent_is_built_and_asked_as_the_session_says(start: Start) -> None:
    """init_kwargs reach the class; the adapter sees every item and the sampling parameters, and its value is the result."""
    items = [said("system", "be kind"), said("user", "world")]
    given = options(init_kwargs={"greeting": "hi"}, model_parameters={"temperature": 0.5})
    driver = start("give-up", options=given, input=items)
    assert driver.wait() == 0, driver.output.read_text()
    assert driver.result["result"] == {"value": "hi be kind+world at 0.5: scripted"}
    assert driver.of("message")[-1]["text"].startswith("hi be kind+world")
    assert [gap["code"] for gap in driver.of("gap")] == ["non_trainable_terminal_output"]


@pytest.mark.parametrize(("adapter", "messages"), [("echo", 1), ("nothing", 0)])
def test_value_that_is_no_news_is_no_message(start: Start, adapter: str, messages: int) -> None:
    """A value that is the model's own last text, and no value at all, need no message made up for them."""
    driver = start("give-up", options=options(invocation=f"own_agent:{adapter}"))
    assert driver.wait() == 0, driver.output.read_text()
    assert [message["final"] for message in driver.of("message")] == [False] * messages
    assert driver.of("gap") == []


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"agent_class": "own_agent:NOT_ASYNC"}, "needed a class"),
        ({"agent_class": "own_agent:Greeter", "invocation": "own_agent:NOT_ASYNC"}, "no async function"),
        ({"agent_class": "own_agent:Greeter", "invocation": "own_agent:takes_one"}, "does not take an agent and a request"),
        ({"agent_class": "own_agent:Greeter", "invocation": "own_agent:absent"}, "absent"),
        ({"agent_class": "own_agent:Greeter"}, "no _solve_task"),
        ({"agent_class": "no_such_module:Agent"}, "no_such_module"),
        ({"init_kwargs": {"llm": 1}}, "found llm in init_kwargs"),
        (options(init_kwargs={"volume": 11}), "init_kwargs do not fit"),
        ({"invocation": "no colon"}, "needed module:async_function"),
    ],
)
def test_entry_that_cannot_work_is_refused_before_the_first_call(
    start: Start, model: ScriptedModel, wrong: dict[str, object], word: str
) -> None:
    """With what was found: by the launcher where that is possible, else as a set-up failure."""
    if "llm" in str(wrong) or "colon" in str(wrong):
        with pytest.raises(ValueError, match=word):
            start("give-up", options=wrong)
    else:
        driver = start("give-up", options=wrong)
        driver.wait()
        assert driver.result["status"] == "setup_failed"
        assert word in driver.result["detail"]
    assert model.calls == []


def test_bench_agent_is_asked_the_latest_message_of_the_user(start: Start, model: ScriptedModel) -> None:
    """As in NeMo Gym; what it does not see of the input is a gap."""
    parts = [{"type": "input_text", "text": "Fix"}, {"type": "input_image", "image_url": "x"}, {"type": "text", "text": "it."}]
    items = [said("system", "SYSTEM"), said("user", "FIRST"), said("assistant", "ANSWER"), said("user", parts)]
    driver = start(prompt="unused", input=items)
    assert driver.wait() == 0, driver.result
    sent = str(model.calls[0].body)
    assert "Fix\\nit." in sent or "Fix\\\\nit." in sent
    assert not any(word in sent for word in ("SYSTEM", "FIRST", "ANSWER", "unused"))
    assert "input_not_shown" in [gap["code"] for gap in driver.of("gap")]


@pytest.mark.parametrize(
    "items", [[said("system", "only")], [said("user", [])], [said("user", "  ")], [said("user", "a"), said("user", "")]]
)
def test_input_without_a_word_of_the_user_is_refused(
    start: Start, model: ScriptedModel, items: list[dict[str, object]]
) -> None:
    driver = start(input=items)
    assert driver.wait() == 1
    assert driver.result["status"] == "setup_failed"
    assert "message of the user" in driver.result["detail"]
    assert model.calls == []


@pytest.mark.parametrize("api", DIALECTS)
def test_sampling_parameters_have_the_dialects_own_names(start: Start, model: ScriptedModel, api: str) -> None:
    """The strict model would refuse the other dialect's."""
    driver = start(api=api, options={"model_parameters": {"temperature": 0.25, "top_p": 0.5, "max_output_tokens": 512}})
    assert driver.wait() == 0, driver.result
    name = "max_output_tokens" if api == "responses" else "max_tokens"
    for call in model.calls:
        assert isinstance(call.body, dict)
        assert (call.body["temperature"], call.body["top_p"], call.body[name]) == (0.25, 0.5, 512)


def test_stopped_agent_leaves_an_interrupted_invocation(start: Start) -> None:
    """NOOA calls the hooks of what was cancelled as if it had ended well."""
    driver = start("sleep")
    eventually(lambda: driver.of("tool_call"), within_s=30)
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait(within_s=6) == 1
    invocations = [note for note in driver.of("log") if note["name"] == "invocation"]
    assert [(one["method"], one["parent_invocation_id"], one["status"]) for one in invocations] == [
        ("_solve_task", None, "interrupted")
    ]
    assert driver.of("python_execution")[-1]["status"] == "interrupted"
