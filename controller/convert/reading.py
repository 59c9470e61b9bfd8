# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Reading values of evidence: what has the wrong type reads as nothing.

An agent may write any event, so no field is taken for what its name promises. It refuses to raise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

Json = dict[str, object]

_TIME_MAX = 253_402_300_799.0
"""The last second of the year 9999: what is beyond it is no time."""
_COUNT_MAX = 2**53


def text(value: object, default: str = "") -> str:
    """Return a string as it is, and anything else as the default. Lone surrogates become question marks."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else default


def shown(value: object) -> str:
    """Return a text as it is, nothing for None, and anything else as JSON."""
    return text(value) if isinstance(value, str) else "" if value is None else text(json.dumps(value, ensure_ascii=False))


def number(value: object) -> float | None:
    """Return a finite number that is not negative and could be a time, in seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and 0 <= value <= _TIME_MAX else None


def count(value: object) -> int | None:
    """Return a whole number that is not negative."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _COUNT_MAX else None


def mapping(value: object) -> Json:
    """Return a JSON object, or an empty one."""
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def listing(value: object) -> list[object]:
    """Return a JSON array, or an empty one."""
    return list(value) if isinstance(value, list) else []


def content_text(content: object) -> str:
    """Return the text of a message's content: a string, or the text parts of any dialect, one a line."""
    if isinstance(content, str):
        return text(content)
    parts = [mapping(part) for part in listing(content)]
    return "\n".join(text(part.get("text")) or text(part.get("refusal")) for part in parts if part.get("type") in _TEXT_PARTS)


_TEXT_PARTS = {"text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal"}
