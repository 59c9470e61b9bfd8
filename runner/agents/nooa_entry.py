# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Where a NOOA agent is entered: which class, built with what, and which function asks it.

An invocation adapter is an async function `adapter(agent, request)`, as NeMo Gym's NOOA agent has them; `request.input` is
what the caller was asked, a text or items of the Responses dialect. Without one, BenchAgent is asked with the latest
text of the user. It refuses what cannot work before the first model call, with the reason.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

from boxstrap.runner.agents.nooa import DEFAULT_AGENT_CLASS
from boxstrap.runner.wire import Request

_TEXT = ("input_text", "text", "output_text")

Ask = Callable[[Any], Awaitable[object]]
"""Asks an agent and returns its answer."""


def agent_class_of(request: Request) -> Any:
    """Import the agent's class.

    Raises:
        TypeError: it is no class that can be built and asked as the request says.
        ImportError, AttributeError: it is not there.
    """
    name = str(request.options.get("agent_class", DEFAULT_AGENT_CLASS))
    found = _load(name)
    if not inspect.isclass(found):
        raise TypeError(f"found {name}, which is a {type(found).__name__}, needed a class")
    if "invocation" not in request.options:
        missing = [part for part in ("_solve_task", "_install_python_tools") if not hasattr(found, part)]
        if missing:
            raise TypeError(
                f"{name} has no {' and no '.join(missing)}, needed an agent like {DEFAULT_AGENT_CLASS} or an invocation"
            )
    try:
        inspect.signature(found).bind(llm=object(), **init_kwargs(request))
    except TypeError as error:
        raise TypeError(f"init_kwargs do not fit {name}: {error}") from error
    return found


def init_kwargs(request: Request) -> dict[str, Any]:
    """Return what the class is built with, besides the model."""
    given = request.options.get("init_kwargs", {})
    return dict(given) if isinstance(given, dict) else {}


def ask_of(request: Request) -> Ask:
    """Return what asks the agent.

    Raises:
        TypeError: the adapter is no async function of an agent and a request.
        ValueError: there is no adapter, and no text to ask.
        ImportError, AttributeError: it is not there.
    """
    name = request.options.get("invocation")
    if name is None:
        prompt = prompt_of(request)
        return lambda agent: agent._solve_task(prompt)  # the harness entry turns every exception into success: false
    adapter = _load(str(name))
    if not inspect.iscoroutinefunction(adapter):
        raise TypeError(f"found {name}, which is no async function, needed one of an agent and a request")
    try:
        inspect.signature(adapter).bind(object(), object())
    except TypeError as error:
        raise TypeError(f"{name} does not take an agent and a request: {error}") from error
    asked = SimpleNamespace(
        input=[dict(item) for item in request.input] or request.prompt,
        model=None if request.model is None else request.model.name,
        tools=[tool for access in request.tool_accesses for tool in access.tools],
        **_parameters(request),
    )
    return lambda agent: adapter(agent, asked)


def prepare(agent: Any, request: Request) -> None:
    """Root BenchAgent's tools in the workdir, and tell it its task; an adapter does so itself."""
    if "invocation" not in request.options:
        agent._install_python_tools(os.getcwd())
        agent.problem_statement = prompt_of(request)


def prompt_of(request: Request) -> str:
    """Return the text of the latest message of the user, or the prompt where no items were given.

    Raises:
        ValueError: that message has no text, or there is none.
    """
    if not request.input:
        return request.prompt
    for item in reversed(request.input):
        if item.get("role") == "user":
            text = _text_of(item.get("content"))
            if text.strip():
                return text
            raise ValueError("the latest message of the user in input has no text")
    raise ValueError("input has no message of the user")


def unseen(request: Request) -> int:
    """Count the items of the input that an agent without an invocation adapter does not see."""
    return 0 if "invocation" in request.options else max(0, len(request.input) - 1)


def _load(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def _text_of(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    return "\n".join(str(part["text"]) for part in parts if part.get("type") in _TEXT and isinstance(part.get("text"), str))


def _parameters(request: Request) -> dict[str, Any]:
    given = request.options.get("model_parameters", {})
    usual = {"instructions": None, "temperature": None, "top_p": None, "max_output_tokens": None}
    more = given if isinstance(given, dict) else {}
    return {**usual, **{key: value for key, value in more.items() if key not in {"input", "model", "tools"}}}
