# SPDX-FileCopyrightText: The boxstrap authors
# SPDX-License-Identifier: Apache-2.0
"""Deadlines that must fit into each other: the recipe's figures hold, and one second too many is refused with the sum."""

from __future__ import annotations

import math

import pytest

from boxstrap.controller.budgets import Budgets
from boxstrap.controller.errors import BudgetError


def test_default_budgets_are_the_recipes_and_hold() -> None:
    """NeMo Gym's SWE-bench Pro figures."""
    budgets = Budgets()
    assert (budgets.worker_s, budgets.episode_s, budgets.sandbox_ttl_s) == (21_420, 21_600, 25_200)
    assert (budgets.command_s, budgets.stop_s, budgets.callback_s, budgets.callbacks) == (180, 120, 180, 3)
    budgets.check()


@pytest.mark.parametrize(
    ("budgets", "sum_shown"),
    [
        (Budgets(worker_s=21_421), "worker_s 21421 + command_s 180 = 21601 s, which does not fit into episode_s 21600 s"),
        (
            Budgets(sandbox_ttl_s=22_440),
            "21420 + 2 x command_s 180 + stop_s 120 + 3 x callback_s 180 = 22440 s, which does not fit into sandbox_ttl_s",
        ),
        (
            Budgets(episode_s=25_000),
            "episode_s 25000 + stop_s 120 + 3 x callback_s 180 = 25660 s, which does not fit into sandbox_ttl_s 25200 s",
        ),
    ],
)
def test_budgets_that_do_not_fit_are_refused_with_the_sum(budgets: Budgets, sum_shown: str) -> None:
    """The message holds every term, so that the reader sees which one to change."""
    with pytest.raises(BudgetError) as refused:
        budgets.check()
    assert sum_shown in str(refused.value)
    assert refused.value.remedy


def test_budgets_may_touch_the_episode_but_not_the_sandboxes_end() -> None:
    """The recipe's own worker and command fill its episode to the second; the sandbox is gone at its last one."""
    Budgets(worker_s=21_420, command_s=180, episode_s=21_600).check()
    Budgets(sandbox_ttl_s=22_440.5).check()


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, True, "60"])
@pytest.mark.parametrize("name", ["worker_s", "episode_s", "sandbox_ttl_s", "command_s", "stop_s", "callback_s"])
def test_budgets_are_finite_numbers_above_zero(name: str, value: object) -> None:
    with pytest.raises(BudgetError, match=name):
        Budgets(**{name: value}).check()  # type: ignore[arg-type]


def test_a_sandbox_without_an_end_holds_any_budget() -> None:
    """Somebody's own container has no time to live."""
    Budgets(sandbox_ttl_s=None, worker_s=1_000_000, episode_s=2_000_000, callbacks=0).check()


def test_another_worker_ceiling_keeps_the_rest() -> None:
    budgets = Budgets().with_worker(60)
    assert (budgets.worker_s, budgets.episode_s) == (60, 21_600)
    budgets.check()
