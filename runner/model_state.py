# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What a session's model calls say about its outcome, read from their events.

Failed calls that nothing good came after veto success: an infrastructure failure must not look like the agent's zero. It
refuses to blame the model for a prompt that is too long, or for a call that the agent itself gave up while another went well.
"""

from __future__ import annotations

from collections.abc import Mapping

from boxstrap.runner.wire import Outcome

_POLICYS_OWN = "too_long"
_BROKEN_OFF = frozenset({"client_gone", "session_ended"})


class ModelState:
    """The calls so far. `trouble` is why the last of them is a failure, or ""."""

    def __init__(self) -> None:
        self.calls = 0
        self.sent = 0
        self.good = 0
        self.exhausted = False
        self.ending = False
        """Whether the session ends the agent: a call that breaks off from now on is nobody's failure."""
        self.trouble = ""
        self._good_at = 0.0
        self._unanswered = ""

    def take(self, data: Mapping[str, object]) -> None:
        """Take the data of one model_call event."""
        self.sent += 1
        self.calls += not data.get("retry")
        error, detail = data.get("error"), str(data.get("detail") or "")
        begun, seconds = data.get("started_at"), data.get("seconds")
        begun = float(begun) if isinstance(begun, (int, float)) else 0.0
        if error is None or error == _POLICYS_OWN:
            self.good += error is None
            self._good_at = begun + (float(seconds) if isinstance(seconds, (int, float)) else 0.0)
            self.trouble = self._unanswered = ""
        elif error in _BROKEN_OFF:
            if begun >= self._good_at:  # no answer since it began
                self._unanswered = detail
                if error == "client_gone" and not self.ending:
                    self.trouble = self.trouble or detail
        else:
            self.trouble = detail or str(error)

    def lost(self) -> None:
        """Note that the gateway itself is gone: what the agent asks from now on gets no answer."""
        self.trouble = "the model gateway ended before the agent"

    def verdict(self, said: str, *, reason: str, by_itself: bool) -> tuple[str, str] | None:
        """Return the outcome and its reason where the calls overrule what the agent `said`; None where they do not.

        Args:
            said: the agent's own word for its end, "" for none.
            reason: why the session ended: exited, stopped, deadline, budget.
            by_itself: whether the agent ended with an exit code and not by a signal that was not ours.
        """
        if reason == "stopped" or said == Outcome.SETUP_FAILED:
            return None
        if self.trouble and (reason != "exited" or by_itself):
            return Outcome.MODEL_FAILED, f"the last model call failed: {self.trouble}"
        if reason == "deadline" and not self.good and self._unanswered:
            return Outcome.MODEL_FAILED, f"the model never answered before the deadline: {self._unanswered}"
        if self.exhausted and (reason != "exited" or by_itself):
            return Outcome.POLICY_BUDGET_EXHAUSTED, "max_policy_calls is used; the work so far stands"
        return None
