# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""The host's exceptions, all under one root.

    BoxstrapError
    ├── UsageError            the caller's configuration or input is wrong
    │   └── BudgetError       one deadline cannot fit into another
    ├── ArtifactError         an interpreter, payload or archive could not be found, built or verified
    ├── SandboxLost           the sandbox is gone or stopped answering (retryable)
    ├── SetupFailed           the box said no
    │   ├── PreflightError    a precondition failed; carries the Report
    │   └── InstallError      the runtime could not be published; carries the Failure
    ├── SessionConflict       another request already holds this session
    ├── SessionStateError     open, invoke and close were called out of order
    ├── CleanupUnconfirmed    processes of the session are left in the sandbox; closing again tries again
    └── EvidenceError         the sandbox broke the evidence format or a cap

Each has `code`, `message` and `remedy`, and prints as one sentence each.
They are not for the agent's own failures: those are results.
"""

from __future__ import annotations

from boxstrap.runner.wire import Failure, Outcome, Report


class BoxstrapError(Exception):
    """The root: what was found and needed (message), and what to do next (remedy)."""

    code = "bug"
    outcome = Outcome.SETUP_FAILED

    def __init__(self, message: str, *, remedy: str = "", code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        """Print the message, then the remedy."""
        return f"{self.message} {self.remedy}".strip()


class UsageError(BoxstrapError):
    """The caller's configuration or input is wrong."""

    code = "usage"


class BudgetError(UsageError):
    """One deadline cannot fit into another."""

    code = "budget"


class ArtifactError(BoxstrapError):
    """An interpreter, payload or archive could not be found, built or verified."""

    code = "artifact"


class SandboxLost(BoxstrapError):
    """The sandbox is gone or stopped answering.

    `passing` is true where the sandbox is there and this one command got no answer: it may get one later.
    """

    code = "sandbox-lost"
    outcome = Outcome.SANDBOX_LOST

    @property
    def passing(self) -> bool:
        """Whether the same call may well succeed when repeated."""
        return self.code in {"sandbox-timeout", "sandbox-refused"}


class SetupFailed(BoxstrapError):
    """The box said no."""

    code = "setup-failed"


class PreflightError(SetupFailed):
    """A precondition failed; its text is the report as a table."""

    def __init__(self, report: Report, *, text: str) -> None:
        failed = [check for check in report.checks if check.status == "fail"]
        super().__init__(text, code=failed[0].code if failed else None)
        self.report = report


class InstallError(SetupFailed):
    """The runtime could not be published."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, remedy=failure.remedy, code=failure.code)
        self.failure = failure


class SessionConflict(BoxstrapError):
    """Another request already holds this session."""

    code = "session-conflict"


class SessionStateError(BoxstrapError):
    """Open, invoke and close were called out of order."""

    code = "session-state"


class CleanupUnconfirmed(BoxstrapError):
    """Processes of the session are left in the sandbox, or nobody could make sure that none is."""

    code = "cleanup-unconfirmed"
    outcome = Outcome.SANDBOX_LOST


class EvidenceError(BoxstrapError):
    """The sandbox broke the evidence format or a cap.

    `passing` is false where a cap was passed: asking again would bring no less.
    """

    code = "evidence"
    outcome = Outcome.SANDBOX_LOST

    @property
    def passing(self) -> bool:
        """Whether a repeated call may bring what was expected."""
        return self.code == "evidence"
