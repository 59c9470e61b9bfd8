# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""NOOA's BenchAgent, through our own driver in the published interpreter.

Options of a request (all optional):

    agent_class       "module:Class"; default nooa_bench.bench_agent:BenchAgent
    init_kwargs       what the class is built with, besides the model
    invocation        "module:async_function" of (agent, request), as in NeMo Gym; BenchAgent's own method by default
    context_window    tokens that the model takes; unknown by default, NOOA then archives only when the model refuses
    model_parameters  what goes into every model call as it is: temperature, top_p, max_output_tokens, reasoning, …
    replay_reasoning  true: reasoning items of the Responses dialect go back to the model; NOOA's own client drops them

It refuses options that it does not know: a typo must not become a default.
"""

from __future__ import annotations

from boxstrap.runner.agents import Launch, driver, options_of
from boxstrap.runner.layout import RuntimePaths, SessionPaths
from boxstrap.runner.wire import Request

DEFAULT_AGENT_CLASS = "nooa_bench.bench_agent:BenchAgent"
OPTIONS: dict[str, type] = {
    "agent_class": str,
    "init_kwargs": dict,
    "invocation": str,
    "context_window": int,
    "model_parameters": dict,
    "replay_reasoning": bool,
}
DIALECTS = ("responses", "chat")
WAITS = True
"""Its driver imports the agent before it asks for the request."""


def launch(request: Request, session: SessionPaths, runtime: RuntimePaths) -> Launch:
    """Start the driver.

    Raises:
        ValueError: an option or the model makes no sense.
    """
    del session
    check(request)
    return driver.start(request, runtime, "boxstrap.runner.agents.nooa_driver")


def check(request: Request) -> None:
    """Say what is wrong with a request for this agent.

    Raises:
        ValueError: with what was found and what was needed.
    """
    _, options = options_of(request, dialects=DIALECTS, **OPTIONS)
    for option, what in (("agent_class", "module:Class"), ("invocation", "module:async_function")):
        module, _, name = str(options.get(option, DEFAULT_AGENT_CLASS)).partition(":")
        if not all(part.isidentifier() for part in module.split(".")) or not name.isidentifier():
            raise ValueError(f"agent nooa: found {option} {options[option]!r}, needed {what}")
    if "llm" in options.get("init_kwargs", {}):
        raise ValueError("agent nooa: found llm in init_kwargs, needed none: the session's model is the agent's")
    names = [access.name for access in request.tool_accesses]
    if len(names) != len(set(names)) or any(access.kind != "direct_http" for access in request.tool_accesses):
        raise ValueError(f"agent nooa: found tool accesses {names}, needed direct_http ones with a name each")
