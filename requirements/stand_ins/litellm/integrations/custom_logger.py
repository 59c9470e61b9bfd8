# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The base class of NOOA's message journal, which nothing calls without litellm's clients."""

from __future__ import annotations


class CustomLogger:
    """Takes what it is given and logs nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()
