# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Any argv as the agent, for people who bring their own. Its stdout lines become `log` events.

The prompt lies in a file that BOXSTRAP_PROMPT_FILE names. The model is at BOXSTRAP_MODEL_URL, which is also what OpenAI's
clients read (OPENAI_BASE_URL, with a key that means nothing) unless the request's `env` says otherwise. It refuses to put
the prompt into argv.
"""

from __future__ import annotations

from boxstrap.runner.agents import End, Event, Launch, private_file
from boxstrap.runner.environment import MODEL_URL
from boxstrap.runner.layout import RuntimePaths, SessionPaths
from boxstrap.runner.wire import Kind, Request


def launch(request: Request, session: SessionPaths, runtime: RuntimePaths) -> Launch:
    """Start the request's argv with the prompt in a file."""
    del runtime
    if not request.argv:
        raise ValueError("agent command: found no argv, needed at least the program; give it after --")
    env = {"BOXSTRAP_PROMPT_FILE": private_file(session, "prompt", request.prompt)}
    if request.model is not None:
        env |= {MODEL_URL: request.model.url, "BOXSTRAP_MODEL_NAME": request.model.name}
        openai = {"OPENAI_BASE_URL": request.model.url, "OPENAI_API_KEY": "none"}
        env |= {name: value for name, value in openai.items() if name not in request.env}
    return Launch(argv=request.argv, env=env, parser=Lines())


class Lines:
    """Keeps each line as it is; the exit code says how it ended."""

    def feed(self, line: bytes) -> list[Event]:
        """Make a log of it."""
        return [(Kind.LOG, {"stream": "stdout", "text": line.decode("utf-8", "replace")})]

    def finish(self, exit_code: int | None) -> End:
        """Add nothing."""
        del exit_code
        return End()
