"""The matrix can fail: with the steps in a wrong order, a kill at the right point loses or doubles something."""

from pathlib import Path

import pytest

from tests.crash.killing import check, finish, kill_at
from tests.crash.mutants import MUTANTS
from tests.crash.places import place

QUICK = (
    "settle before commit",
    "outbox row removed before it is published",
    "claim made anew",
    "resolved rows go to the end",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full]) for name in MUTANTS]
)
async def test_a_wrong_order_is_seen(name: str, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    async with place(mutant.form, tmp_path) as where:
        numbers = range(mutant.orders)
        more = {"mutant": name, "at_once": mutant.orders, "together": mutant.together}
        done = kill_at(where, mutant.point, mutant.nth, numbers, **more)
        finish(where, numbers, done, mutant=name)
        with pytest.raises(AssertionError):
            check(where, numbers)
