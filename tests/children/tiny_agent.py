# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Somebody's own agent, for the agent `command`: asks the model for shell commands until it has none. Standard library only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

URL, NAME = os.environ["BOXSTRAP_MODEL_URL"], os.environ["BOXSTRAP_MODEL_NAME"]
TOOL = {"type": "function", "function": {"name": "shell", "parameters": {"type": "object", "properties": {}}}}

messages = [{"role": "user", "content": Path(os.environ["BOXSTRAP_PROMPT_FILE"]).read_text(encoding="utf-8")}]
while True:
    body = json.dumps({"model": NAME, "messages": messages, "tools": [TOOL]}).encode()
    asked = urllib.request.Request(f"{URL}/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked) as response:
        answer = json.load(response)["choices"][0]["message"]
    messages.append(answer)
    if not answer.get("tool_calls"):
        print(answer["content"])
        sys.exit(0)
    for call in answer["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        print(command, flush=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
