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

from boxstrap.runner.agents import Launch, options_of
from boxstrap.runner.environment import MODEL_URL
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
    assert request.model is not None  # noqa: S101 (check() saw to it)
    argv = [runtime.python, "-I", "-B", "-c", _START, runtime.site, runtime.app]
    return Launch(argv=argv, env={MODEL_URL: request.model.url}, interpreter=True)


def check(request: Request) -> None:
    """Say what is wrong with a request for this agent.

    Raises:
        ValueError: with what was found and what was needed.
    """
    _, options = options_of(request, dialects=DIALECTS, **OPTIONS)
    module, _, name = str(options.get("agent_class", DEFAULT_AGENT_CLASS)).partition(":")
    if not module or not name.isidentifier():
        raise ValueError(f"agent nooa: found agent_class {options['agent_class']!r}, needed module:Class")
