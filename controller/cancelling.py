# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Work that a cancelled caller must not leave half done. It refuses to swallow the cancellation: it comes afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def carry_through(work: Awaitable[T]) -> T:
    """Await work to its end, however often the caller is cancelled meanwhile, and cancel the caller then.

    The work has to be bounded by itself.

    Raises:
        asyncio.CancelledError: the caller was cancelled; what the work raised is its cause.
        Exception: what the work raised.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    return task.result()
