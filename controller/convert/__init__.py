# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The evidence of a session in the shapes of others: plain data that their own models accept.

    story = story_of(read_events(result.evidence), request=…, result=…)
    to_responses(story)  to_observations(story, model_ref="policy")  to_atif(story)

Everything in them is agent-reported, and each says so. It refuses to import anything of those whose shapes these are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from boxstrap.controller.collect import read_events
from boxstrap.controller.convert.atif import to_atif
from boxstrap.controller.convert.observations import to_observations
from boxstrap.controller.convert.reading import Json, mapping
from boxstrap.controller.convert.responses import to_responses
from boxstrap.controller.convert.story import PROVENANCE, Story
from boxstrap.controller.convert.telling import story_of
from boxstrap.controller.errors import UsageError
from boxstrap.runner.wire import Event

__all__ = ["PROVENANCE", "TARGETS", "Story", "story_in", "story_of", "to_atif", "to_observations", "to_responses"]

TARGETS: Mapping[str, Callable[[Story], Json]] = {
    "responses": to_responses,
    "observations": to_observations,
    "atif": to_atif,
}


def story_in(folder: Path) -> Story:
    """Tell the story of a session's folder on the host (`SessionSpec.out`).

    Raises:
        UsageError: there is no evidence in it.
    """
    evidence = folder / "evidence.ndjson"
    if not evidence.is_file():
        raise UsageError(f"Found no evidence.ndjson in {folder}.", remedy="Give the folder that --out named.")
    events = (_whole(event, folder / "artifacts") for event in read_events(evidence))
    return story_of(events, request=_plain(folder / "request.json"), result=_plain(folder / "result.json"))


def _whole(event: Event, artifacts: Path) -> Event:
    """Return an event with the payload that was too long for its line, where the host has fetched it."""
    digest = event.data.get("artifact")
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
        return event
    return replace(event, data={**event.data, **_plain(artifacts / digest)})


def _plain(path: Path) -> Json:
    """Read a file of JSON; one that is not there, or not whole, says nothing."""
    try:
        return mapping(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return {}
