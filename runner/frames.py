# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What a relayed model call looks like between the gateway in the box and the controller on the host.

A frame is a length, a type, a call's number, and bytes. A call is REQUEST and BODY frames one way, and HEAD, DATA and END (or
FAIL) the other; CANCEL takes it back. Imported on both sides, standard library only. It refuses to carry a URL: what the
controller calls is its own affair, and a request names no more than one of PATHS, or a function that the session was granted.
"""

from __future__ import annotations

import json
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

PATHS = {"chat": "/chat/completions", "responses": "/responses", "messages": "/messages", "models": "/models"}
"""What follows the model's base URL, by dialect; "models" is the list of models (GET), and no call."""
TOOL = "tool:"
"""How the `dialect` of a granted function begins; the access's name, a slash and the function's name follow."""
PASSED_ON = ("content-type", "accept", "anthropic-version", "anthropic-beta", "openai-beta")
"""The agent's headers that a relayed request has; all others are the controller's."""
PIECE_MAX = 256 * 1024
"""Bytes of body in one frame."""
FRAME_MAX = PIECE_MAX + 64 * 1024
_HEAD = struct.Struct(">IBI")
_FAILED_MAX = 256


class Type(IntEnum):
    """The types of frames: from the gateway, then from the controller."""

    REQUEST = 1
    BODY = 2
    CANCEL = 3
    HEAD = 11
    DATA = 12
    END = 13
    FAIL = 14


class Frame(NamedTuple):
    """One frame. REQUEST, HEAD and FAIL hold JSON; BODY and DATA hold bytes; CANCEL and END hold nothing."""

    type: Type
    call: int
    payload: bytes = b""

    @classmethod
    def of(cls, type: Type, call: int, said: object) -> Frame:  # noqa: A002 (the field's own name)
        """Make a frame that holds JSON."""
        return cls(type, call, json.dumps(said).encode("ascii"))

    def said(self) -> dict[str, object]:
        """Read the JSON.

        Raises:
            ValueError: it holds none.
        """
        said = json.loads(self.payload)
        if not isinstance(said, dict):
            raise ValueError(f"a frame of type {self.type.name} holds no JSON object")  # noqa: TRY004 (bad input)
        return said

    def packed(self) -> bytes:
        """Write it."""
        return _HEAD.pack(len(self.payload), self.type, self.call) + self.payload


def pieces(body: bytes) -> Iterable[bytes]:
    """Cut a body so that each piece fits into a frame."""
    return (body[start : start + PIECE_MAX] for start in range(0, len(body), PIECE_MAX))


class Unpacker:
    """Reads frames from a stream of bytes."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that `data` completes.

        Raises:
            ValueError: this is no stream of frames.
        """
        self._rest += data
        while len(self._rest) >= _HEAD.size:
            length, kind, call = _HEAD.unpack_from(self._rest)
            if length > FRAME_MAX:
                raise ValueError(f"found a frame of {length} bytes, needed at most {FRAME_MAX}")
            if len(self._rest) < _HEAD.size + length:
                return
            payload = bytes(self._rest[_HEAD.size : _HEAD.size + length])
            del self._rest[: _HEAD.size + length]
            yield Frame(Type(kind), call, payload)


class PolicyBudget:
    """Counts policy calls against max_policy_calls (None: no limit), on both sides by the same rule.

    The same request again after a failure is another attempt of that call: the model gave nothing for it.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._used = 0
        self._failed: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def take(self, key: str) -> tuple[int, int] | None:
        """Return (number of the call, attempts before this one); None when the budget is used."""
        known = self._failed.pop(key, None)
        if known is not None:
            return known
        if self.limit is not None and self._used >= self.limit:
            return None
        self._used += 1
        return self._used, 0

    def failed(self, key: str, call: int, attempts: int) -> None:
        """Remember that this request failed `attempts` times by now, so that it is known when it comes again."""
        self._failed[key] = (call, attempts)
        while len(self._failed) > _FAILED_MAX:
            self._failed.popitem(last=False)
