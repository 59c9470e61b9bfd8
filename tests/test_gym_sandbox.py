# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""What only the Gym adapter promises: whatever a provider answers, raises or never says becomes one shape."""

from __future__ import annotations

import asyncio
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from boxstrap.controller.sandboxes import gym
from boxstrap.controller.sandboxes.gym import GymSandbox
from boxstrap.controller.sandboxes.output import BoundedText, Output


class Word(Enum):
    """An error type as an enum, as some providers have it."""

    TIMEOUT = "timeout"


class Answering:
    """A provider that gives one answer, raises it, or hangs on it."""

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.asked: dict[str, Any] = {}

    async def exec(self, command: str, **options: Any) -> Any:
        """Answer."""
        self.asked = {"command": command, **options}
        if isinstance(self.answer, BaseException):
            raise self.answer
        if self.answer is asyncio.Event:
            await asyncio.Event().wait()
        return self.answer

    async def upload(self, local_path: Path | str, remote_path: str) -> None:
        """Take nothing."""

    async def download(self, remote_path: str, local_path: Path | str) -> None:
        """Give nothing."""


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (("out", "err", 3, None), Output(stdout="out", stderr="err", return_code=3)),
        ((None, None, 0), Output(stdout="", stderr="", return_code=0)),
        (
            SimpleNamespace(stdout="o", stderr=None, return_code=1, error_type=None),
            Output(stdout="o", stderr="", return_code=1),
        ),
        ({"stdout": b"\xff", "return_code": 0}, Output(stdout="\N{REPLACEMENT CHARACTER}", stderr="", return_code=0)),
        ((None, "late", 125, Word.TIMEOUT), Output(stdout="", stderr="late", return_code=125, error_type="timeout")),
    ],
)
async def test_gym_answers_become_one_shape(answer: object, expected: Output) -> None:
    """An object, a tuple or a dict; bytes or text; an enum or a word."""
    assert await GymSandbox(Answering(answer)).exec("true") == expected


@pytest.mark.parametrize("answer", [RuntimeError("Sandbox has not been started"), ConnectionError("reset")])
async def test_gym_provider_that_raises_is_a_lost_sandbox(answer: Exception) -> None:
    """Its words are kept."""
    result = await GymSandbox(Answering(answer)).exec("true")
    assert (result.return_code, result.error_type) == (125, "sandbox_lost")
    assert str(answer) in result.stderr


async def test_gym_provider_that_gives_no_code_failed(tmp_path: Path) -> None:
    """An answer without a return code is the provider's failure, never a zero."""
    del tmp_path
    result = await GymSandbox(Answering((None, None, None))).exec("true")
    assert (result.return_code, result.error_type) == (125, "sandbox_error")


async def test_gym_provider_that_never_answers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's own bound is the command's and a grace."""
    monkeypatch.setattr(gym, "_GRACE_S", 0.2)
    result = await GymSandbox(Answering(asyncio.Event)).exec("true", timeout_s=0.1)
    assert (result.return_code, result.error_type) == (125, "timeout")


async def test_gym_provider_gets_plain_values() -> None:
    """NeMo Gym declares a dict for env; the rest is handed on unchanged."""
    inner = Answering(("", "", 0))
    await GymSandbox(inner).exec("true", cwd="/w", env={"A": "b"}, timeout_s=7, user="app")
    assert inner.asked == {"command": "true", "cwd": "/w", "env": {"A": "b"}, "timeout_s": 7, "user": "app"}


def test_bounded_text_says_where_it_was_cut() -> None:
    """The cut falls between bytes; a character that it splits is replaced."""
    kept = BoundedText(4)
    for chunk in (b"ab", "äöü".encode()):
        kept.add(chunk)
    assert kept.text() == "abä\n[boxstrap: truncated at 4 of 8 bytes]\n"
