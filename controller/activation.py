# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Activation presets: how known kinds of task images make their task environment, by name.

A preset is a bash snippet that leaves a box of another kind as it is. It refuses to guess: only a preset's exact name means it.
"""

from __future__ import annotations

PRESETS = {
    # SWE-bench's images run their tests in the conda env `testbed`.
    "swe-bench": """\
for conda in /opt/miniconda3 /opt/conda; do
    [ -d "$conda/envs/testbed" ] || continue
    if [ -f "$conda/etc/profile.d/conda.sh" ]; then
        . "$conda/etc/profile.d/conda.sh" && conda activate testbed
    else
        . "$conda/bin/activate" testbed
    fi
    [ "${CONDA_DEFAULT_ENV-}" = testbed ] || { echo "found $conda/envs/testbed, and it was not activated" >&2; exit 1; }
    break
done""",
}


def snippet(activation: str) -> str:
    """Return the bash snippet that an activation means: a preset's, or the text itself."""
    return PRESETS.get(activation, activation)
