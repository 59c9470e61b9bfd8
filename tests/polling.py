# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Waiting for something that happens elsewhere, by asking again, within a bound. It never just sleeps and hopes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(predicate: Callable[[], T], *, within_s: float = 10.0, every_s: float = 0.02) -> T:
    """Returns the predicate's first true value; an AssertionError raised in it counts as "not yet".

    Raises:
        AssertionError: It was not true within `within_s` seconds; the text has the last value, or the last assertion.
    """
    deadline = time.monotonic() + within_s
    while True:
        last: object
        try:
            if value := predicate():
                return value
            last = value
        except AssertionError as error:
            last = error
        if time.monotonic() > deadline:
            raise AssertionError(f"not true within {within_s} s: {getattr(predicate, '__name__', predicate)}; last: {last!r}")
        time.sleep(every_s)
