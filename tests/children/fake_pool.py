#!/usr/bin/env python3
# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""A stand-in for Poolside's `pool`, which cannot be had here. It is not pool, and says so when it is asked for its version.

It is as strict as the public reference: flags, files and settings that pool would not take are refused, for what a stand-in
lets pass proves nothing. What it is given it uses: it asks the model at the configured URL, acts in the shell, writes its
state where HOME and XDG point. FAKE_POOL_LINE is printed as one more event, for events of versions to come.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any, NoReturn

NUMBER = (int, float)
SCHEMA: dict[str, Any] = {
    "max_steps": int,
    "enabled_tools": list,
    "http_timeout": str,
    "enable_no_tool_call_retry": bool,
    "enable_truncation_recovery": bool,
    "enable_multi_tool_calls": bool,
    "enable_tool_call_loop_detection": bool,
    "enable_todo_reminders": bool,
    "parallel_tool_calls": {"tools": list},
    "tools": {
        "edit": {"fuzzy_match_threshold": NUMBER},
        "read": {"max_lines": int, "line_num_separator": str},
        "write": {"line_num_separator": str},
        "shell": {"foreground_timeout": str},
    },
    "model": {
        "provider": {"openai": {"base_url": str, "api_key": str, "model_id": str, "use_streaming": bool}},
        "prompt": {"hidden_tool_names": list},
        "max_completion_retries": int,
        "max_completion_retries_transient": int,
        "exit_tool_on_stop": bool,
        "streaming_events_interval": str,
    },
    "memory": {
        "compact": {"TriggerCompressionTokenCount": int, "MaxSummarizeTokenCount": int, "MinRetainedSteps": int},
    },
}
"""Nothing is merged with defaults: each key has to be there, and no other."""

EPHEMERAL = {"type": "ephemeral"}
SHELL = {
    "type": "function",
    "function": {"name": "shell", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
    "cache_control": EPHEMERAL,
}


class ModelError(Exception):
    """The model gave no answer; `transient` says that asking again may help."""

    def __init__(self, text: str, *, transient: bool) -> None:
        super().__init__(text)
        self.transient = transient


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


def refuse(text: str) -> NoReturn:
    say(type="error", error=text)
    sys.exit(1)


def objection(found: Any, wanted: Any, where: str = "config") -> str:
    """Say where a configuration is not what the schema says."""
    if not isinstance(wanted, dict):
        kinds = wanted if isinstance(wanted, tuple) else (wanted,)
        right = isinstance(found, kinds) and (bool in kinds or not isinstance(found, bool))
        return "" if right else f"{where} is {found!r}"
    if not isinstance(found, dict) or set(found) != set(wanted):
        return f"{where} has the keys {sorted(found) if isinstance(found, dict) else found!r}, needed {sorted(wanted)}"
    return next((said for key in wanted if (said := objection(found[key], wanted[key], f"{where}.{key}"))), "")


def ask(config: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Ask the model, as often as the configuration allows."""
    openai, model = config["model"]["provider"]["openai"], config["model"]
    marked = [*messages[:-1], {**messages[-1], "content": cached(messages[-1]["content"])}]
    body = json.dumps({"model": openai["model_id"], "messages": marked, "tools": [SHELL], "stream": openai["use_streaming"]})
    failures = {True: 0, False: 0}
    while True:
        try:
            return once(f"{openai['base_url']}/chat/completions", body.encode(), openai["api_key"])
        except ModelError as error:
            failures[error.transient] += 1
            most = model["max_completion_retries_transient"] if error.transient else model["max_completion_retries"]
            if failures[error.transient] > most:
                raise
            time.sleep(0.05)


def cached(content: Any) -> Any:
    return [{"type": "text", "text": content, "cache_control": EPHEMERAL}] if isinstance(content, str) else content


def once(url: str, body: bytes, key: str) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=300) as response:
            return json.load(response)["choices"][0]["message"]  # type: ignore[no-any-return]
    except urllib.error.HTTPError as error:
        raise ModelError(f"HTTP {error.code}: {error.read(500)!r}", transient=error.code >= 500 or error.code == 429) from error
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{type(error).__name__}: {error}", transient=True) from error


def shell(command: str) -> dict[str, str]:
    done = subprocess.run(
        ["sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return {"result": done.stdout} if done.returncode == 0 else {"err": f"exit status {done.returncode}\n{done.stdout}"}


def remember(messages: list[dict[str, Any]]) -> None:
    folder = os.path.join(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "poolside")  # noqa: PTH111, PTH118
    os.makedirs(folder, exist_ok=True)  # noqa: PTH103
    with open(os.path.join(folder, "trajectory.json"), "w", encoding="utf-8") as file:  # noqa: PTH118, PTH123
        json.dump(messages, file)


def run(config: dict[str, Any], prompt: str) -> int:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are a stand-in."}, {"role": "user", "content": prompt}]
    if os.environ.get("FAKE_POOL_LINE"):
        print(os.environ["FAKE_POOL_LINE"], flush=True)
    while True:
        try:
            answer = ask(config, messages)
        except ModelError as error:
            say(type="error", error=f"completion failed: {error}")
            return 1
        messages.append(answer)
        if answer.get("reasoning_content"):
            say(type="reasoning", reasoning=answer["reasoning_content"])
            say(type="thought", thought=answer["reasoning_content"])
        say(type="assistantMessage", message=answer.get("content") or "\n")
        calls = answer.get("tool_calls") or []
        remember(messages)
        if not calls:
            return 4 if "cannot complete" in (answer.get("content") or "") else 0
        asked = [json.loads(call["function"]["arguments"]) for call in calls]
        for call, arguments in zip(calls, asked, strict=True):
            say(type="toolCall", name=call["function"]["name"], args=arguments)
        for call, arguments in zip(calls, asked, strict=True):
            result = shell(arguments["command"])
            say(type="toolCallResult", **result)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)})


def main() -> int:
    parser = argparse.ArgumentParser(prog="pool", allow_abbrev=False)
    parser.add_argument("--version", action="version", version="a stand-in for pool, for tests")
    execute = parser.add_subparsers(required=True).add_parser("exec", allow_abbrev=False)
    execute.add_argument("-o", choices=["json"], required=True)
    execute.add_argument("--sandbox", choices=["disabled"], required=True)
    execute.add_argument("--unsafe-auto-allow", action="store_true", required=True)
    execute.add_argument("--agent-config-file", required=True)
    execute.add_argument("-f", required=True)
    execute.add_argument("-d", default=".")
    options = parser.parse_args()
    if not os.environ.get("POOLSIDE_API_KEY"):
        say(type="oauth_url", url="https://login.invalid/")
        sys.stdin.read()
        time.sleep(3600)
    try:
        with open(options.agent_config_file, encoding="utf-8") as file:  # noqa: PTH123
            config = json.load(file)
        with open(options.f, encoding="utf-8") as file:  # noqa: PTH123
            prompt = file.read()
        os.chdir(options.d)
    except (OSError, ValueError) as error:
        refuse(str(error))
    if said := objection(config, SCHEMA):
        refuse(said)
    if not config["model"]["provider"]["openai"]["base_url"].endswith("/v1"):
        refuse("base_url must end in /v1")
    if not prompt.strip():
        refuse("the prompt is empty")
    return run(config, prompt)


if __name__ == "__main__":
    sys.exit(main())
