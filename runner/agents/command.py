# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Any argv as the agent, for people who bring their own. Its stdout lines become `log` events.

The prompt lies in a file that BOXSTRAP_PROMPT_FILE names. It refuses to put the prompt into argv.
"""

from __future__ import annotations

import os

from boxstrap.runner.agents import Launch
from boxstrap.runner.layout import RuntimePaths, SessionPaths
from boxstrap.runner.wire import Kind, Request


def launch(request: Request, session: SessionPaths, runtime: RuntimePaths) -> Launch:
    """Start the request's argv with the prompt in a file."""
    del runtime
    if not request.argv:
        raise ValueError("agent command: found no argv, needed at least the program; give it after --")
    prompt = os.path.join(session.tmp, "prompt")
    with open(os.open(prompt, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w", encoding="utf-8") as file:
        file.write(request.prompt)
    env = {"BOXSTRAP_PROMPT_FILE": prompt}
    if request.model is not None:
        env |= {"BOXSTRAP_MODEL_URL": request.model.url, "BOXSTRAP_MODEL_NAME": request.model.name}
    return Launch(argv=request.argv, env=env)


def parse(line: bytes) -> list[tuple[Kind, dict[str, object]]]:
    """Keep each line as it is."""
    return [(Kind.LOG, {"stream": "stdout", "text": line.decode("utf-8", "replace")})]
