# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""An agent of the opaque kind: a real HTTP client that asks its model, retries a little, and tells nobody but by its exit code.

    ask_model.py [--calls N] [--retries N] [--shrug] [--stream] [--hold S] [--pause S]

It takes the model from BOXSTRAP_MODEL_URL, asks N questions one after the other, and exits 1 when one gets no answer; with
--shrug it exits 0 all the same. --hold goes on for so many seconds after the last answer or failure; --pause waits before each
question.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request


def ask(url: str, body: dict[str, object]) -> str:
    """Ask once; "" for an answer, else what went wrong."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as reply:
            raw = reply.read()
        if body.get("stream"):
            return "" if b"response.completed" in raw else "no whole stream"
        return "" if isinstance(json.loads(raw).get("output"), list) else "no answer in it"
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode(errors='replace')}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"


def main() -> int:
    """Ask, retry, exit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=1)
    parser.add_argument("--retries", type=int, default=2)
    parser.add_argument("--shrug", action="store_true")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--hold", type=float, default=0.0)
    parser.add_argument("--pause", type=float, default=0.0)
    options = parser.parse_args()
    url = os.environ["BOXSTRAP_MODEL_URL"] + "/responses"
    failed = False
    for number in range(options.calls):
        time.sleep(options.pause)
        body: dict[str, object] = {"model": os.environ["BOXSTRAP_MODEL_NAME"], "input": f"question {number}"}
        if options.stream:
            body["stream"] = True
        for attempt in range(options.retries + 1):
            problem = ask(url, body)
            print(f"{number}.{attempt}: {problem or 'answered'}", flush=True)
            if not problem:
                break
            if problem[:3].isdigit() and problem[:3] not in {"408", "429"} and int(problem[:3]) < 500:
                failed = True
                break
            time.sleep(0.05)
        else:
            failed = True
        if failed and not options.shrug:
            break
    time.sleep(options.hold)
    return 1 if failed and not options.shrug else 0


if __name__ == "__main__":
    sys.exit(main())
