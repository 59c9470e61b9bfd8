# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""NOOA's BenchAgent, through our own driver in the published interpreter.

Options of a request (all optional):

    agent_class       "module:Class"; default nooa_bench.bench_agent:BenchAgent
    context_window    tokens that the model takes; unknown by default, NOOA then archives only when the model refuses
    model_parameters  what goes into every model call as it is: temperature, top_p, max_output_tokens, reasoning, …
    replay_reasoning  true: reasoning items of the Responses dialect go back to the model; NOOA's own client drops them

It refuses options that it does not know: a typo must not become a default.
"""

from __future__ import annotations

from collections.abc import Mapping

from boxstrap.runner.agents import Launch
from boxstrap.runner.layout import RuntimePaths, SessionPaths
from boxstrap.runner.wire import Request

NAME = "nooa"
DEFAULT_AGENT_CLASS = "nooa_bench.bench_agent:BenchAgent"
OPTIONS: dict[str, type] = {"agent_class": str, "context_window": int, "model_parameters": dict, "replay_reasoning": bool}
DIALECTS = ("responses", "chat")

_START = "import sys; sys.path += sys.argv[1:]; del sys.argv[1:]; from boxstrap.runner.agents.nooa_driver import main; main()"


def launch(request: Request, session: SessionPaths, runtime: RuntimePaths) -> Launch:
    """Start the driver: -I keeps PYTHON* and the workdir out of it, -B keeps it from writing into the runtime.

    It reports through the event pipe; its stdout is chatter of libraries, kept in agent.out.

    Raises:
        ValueError: an option or the model makes no sense.
    """
    del session
    check(request)
    return Launch(argv=[runtime.python, "-I", "-B", "-c", _START, runtime.site, runtime.app], interpreter=True)


def check(request: Request) -> None:
    """Say what is wrong with a request for this agent.

    Raises:
        ValueError: with what was found and what was needed.
    """
    if request.model is None:
        raise ValueError("agent nooa: found no model, needed its url and name")
    if request.model.api not in DIALECTS:
        raise ValueError(f"agent nooa: found model api {request.model.api!r}, needed one of {', '.join(DIALECTS)}")
    _check_options(request.options)


def _check_options(options: Mapping[str, object]) -> None:
    for name, value in options.items():
        kind = OPTIONS.get(name)
        if kind is None:
            raise ValueError(f"agent nooa: found option {name!r}, needed one of {', '.join(OPTIONS)}")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"agent nooa: found {name}={value!r}, needed {kind.__name__}")
    module, _, name = str(options.get("agent_class", DEFAULT_AGENT_CLASS)).partition(":")
    if not module or not name.isidentifier():
        raise ValueError(f"agent nooa: found agent_class {options['agent_class']!r}, needed module:Class")
