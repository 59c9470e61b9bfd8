# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps the host's secrets out of the box: a request that carries what looks like a provider's key is refused."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from boxstrap.controller.errors import UsageError
from boxstrap.runner.wire import Request, to_json

_SECRET_NAME = re.compile(r"(API_?KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)$", re.IGNORECASE)
_KEYS = re.compile(r"\b(sk-(ant|proj|or|svcacct)-[\w-]{16,}|gh[pousr]_\w{30,}|AKIA[A-Z0-9]{16}|nvapi-[\w-]{30,}|hf_\w{30,})")
_SHORTEST = 12
"""Characters below which a value is no secret worth the name."""


def refuse_credentials(request: Request, environ: Mapping[str, str] = os.environ) -> None:
    """Look through the whole request for the host's own secrets and for the forms of known providers' keys.

    Raises:
        UsageError: there is one; the text names where it comes from, never what it is.
    """
    text = to_json(request)
    for name, value in environ.items():
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST and value in text:
            raise UsageError(
                f"The request carries the value of the host's {name}, needed a request without credentials.",
                remedy="Leave it out, or say allow_credentials if the box may have it.",
                code="credentials",
            )
    if found := _KEYS.search(text):
        raise UsageError(
            f"The request carries what looks like a provider's key ({found[0][:6]}…), needed a request without credentials.",
            remedy="Leave it out, or say allow_credentials if the box may have it.",
            code="credentials",
        )
