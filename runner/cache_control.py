# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Drops Anthropic's cache_control from a chat body, where strict model servers refuse it: on content parts and on tools.

It refuses to write a body anew: a tool's own schema, numbers, escapes and white space stay the very same bytes.
"""

from __future__ import annotations

import json

_DECODER = json.JSONDecoder()


def without_cache_control(body: bytes) -> bytes:
    """Return the body without `cache_control` on the parts of messages[].content[] and on tools[]; else the very same bytes.

    Nothing is written anew: what goes is cut out where it stands, and all other bytes stay as they were.
    """
    if b'"cache_control"' not in body:
        return body
    try:
        text = body.decode("utf-8")
        cuts = _cuts(text)
    except (ValueError, IndexError, RecursionError):  # no JSON: the model may say so
        return body
    for begin, end in reversed(cuts):
        text = text[:begin] + text[end:]
    return text.encode() if cuts else body


def _cuts(text: str) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for name, start, _ in _members(text, _skip(text, 0)):
        if name == "tools":
            for tool, _ in _items(text, start):
                found += _cut(text, tool)
        elif name == "messages":
            for message, _ in _items(text, start):
                for key, content, _ in _members(text, message):
                    if key == "content":
                        for part, _ in _items(text, content):
                            found += _cut(text, part)
    return found


def _cut(text: str, at: int) -> list[tuple[int, int]]:
    """Give what must go so that the object at `at` has no cache_control: the member, and one of the commas beside it."""
    cuts: list[tuple[int, int]] = []
    kept = _skip(text, at) + 1  # the end of the last member that stays, or the opening brace
    first = True
    for name, _, (begin, end) in _members(text, at):
        if name == "cache_control":
            if first:
                after = _skip(text, end)
                cuts.append((begin, _skip(text, after + 1) if text[after] == "," else end))
            else:
                cuts.append((kept, end))
                kept = end
        else:
            first, kept = False, end
    return cuts


def _members(text: str, at: int) -> list[tuple[str, int, tuple[int, int]]]:
    """List (name, where its value begins, (where the member begins, where it ends)) of the object at `at`, if it is one."""
    at = _skip(text, at)
    found: list[tuple[str, int, tuple[int, int]]] = []
    if text[at] != "{":
        return found
    at = _skip(text, at + 1)
    while text[at] != "}":
        name, after = _DECODER.raw_decode(text, at)
        value = _skip(text, _skip(text, after) + 1)  # past the colon
        end = _end(text, value)
        found.append((str(name), value, (at, end)))
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return found


def _items(text: str, at: int) -> list[tuple[int, int]]:
    """List where each item of the array at `at` begins and ends; none if it is none."""
    at = _skip(text, at)
    found: list[tuple[int, int]] = []
    if text[at] != "[":
        return found
    at = _skip(text, at + 1)
    while text[at] != "]":
        end = _end(text, at)
        found.append((at, end))
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return found


def _end(text: str, at: int) -> int:
    return _DECODER.raw_decode(text, at)[1]


def _skip(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at
