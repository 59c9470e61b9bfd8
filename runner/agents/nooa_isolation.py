# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""NOOA's own reach, cut while it is imported and built.

It would read configuration from the task's repository, fetch a price list, and send every prompt to whatever answers on port
5001. It refuses to leave a trace: the variables that cut it are gone again before the first shell starts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_NOWHERE = "/nonexistent/boxstrap"
_WHILE_BUILDING = {
    "NEMO_OO_PROJECT_DIR": _NOWHERE,  # else .nooa/ of the task's repository is read, -I or not
    "NEMO_OO_USER_DIR": _NOWHERE,
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else litellm fetches a price list, three times over
    "LITELLM_MODE": "PRODUCTION",  # else litellm loads .env files
    "OTLP_ENDPOINT": "none:",  # no URL at all: a task's http_proxy would answer for any host
}


@contextlib.contextmanager
def cut_off() -> Iterator[None]:
    """Keep NOOA and litellm from reaching out while they are imported and built; then the environment is the task's again."""
    before = {name: os.environ.get(name) for name in _WHILE_BUILDING}
    os.environ.update(_WHILE_BUILDING)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
