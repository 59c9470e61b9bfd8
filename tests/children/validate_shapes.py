# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Validates what comes on stdin, one JSON object a line, with the models of nemo-gym and harbor; answers a line each.

Its argument is the folder that holds them. It refuses to import more than their models: Gym looks up the version of ray, which
is hundreds of megabytes, and is told 0.
"""

import importlib.metadata
import json
import sys

sys.path.insert(0, sys.argv[1])
_version = importlib.metadata.version
importlib.metadata.version = lambda name: "0" if name == "ray" else _version(name)  # type: ignore[assignment]

from harbor.models.trajectories import Trajectory  # noqa: E402 (the folder is known only now)
from nemo_gym.atif_v1_7 import AtifTrajectoryV1_7  # noqa: E402
from nemo_gym.openai_utils import NeMoGymResponse  # noqa: E402
from nemo_gym.rollout_observability import AgentObservationBundle  # noqa: E402
from nemo_gym.tool_access import DirectHTTPToolAccess  # noqa: E402

MODELS = {
    "responses": [NeMoGymResponse],
    "observations": [AgentObservationBundle],
    "atif": [Trajectory, AtifTrajectoryV1_7],
    "tool_access": [DirectHTTPToolAccess],
}

for line in sys.stdin:
    asked = json.loads(line)
    error, said, kinds = "", {}, []
    try:
        for model in MODELS[asked["target"]]:
            value = model.model_validate(asked["value"])
            said = value.model_dump(mode="json", exclude_unset=True)
            parts = getattr(value, "output", None) or getattr(value, "records", None) or []
            kinds = [type(part).__name__ for part in parts]
    except Exception as problem:  # noqa: BLE001
        # Broad on purpose: whatever a model raises is the answer.
        error = f"{type(problem).__name__}: {problem}"
    print(json.dumps({"error": error, "said": said, "kinds": kinds}), flush=True)
