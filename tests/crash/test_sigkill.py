"""SIGKILL at every fault point, of a real process, in every form of store: afterwards every effect is there once.

The default tier takes a part; `./dev test --full` takes every point of every form, the first and the third time it is
reached.
"""

from pathlib import Path

import pytest

from faregate.ports.faults import POINTS
from tests.crash.killing import check, finish, kill_at, reached, run
from tests.crash.places import POINTS_OF, TICK_POINTS, place

NUMBERS = range(12)
SERVERS = [form for form in POINTS_OF if form.endswith("postgres")]
TIMES = (1, 3)

QUICK = {
    *(("ledger-sqlite", point, 3) for point in POINTS_OF["ledger-sqlite"] if not point.endswith("-handler")),
    ("ledger-postgres", "bus.after-handler", 3),
    ("ledger-postgres", "unit.after-commit", 3),
    ("tokens-merged-sqlite", "bus.before-handler", 3),
    ("tokens-merged-sqlite", "tokens.resolved", 3),
    *(("tokens-apart-sqlite", point, 3) for point in POINTS_OF["tokens-apart-sqlite"] if point.startswith("tokens.")),
    ("tokens-apart-sqlite", "unit.after-commit", 1),
    ("tokens-apart-postgres", "tokens.created", 1),
}


def cases() -> list[object]:
    listed: list[object] = []
    for form, points in POINTS_OF.items():
        for point in points:
            for nth in TIMES:
                marks = [pytest.mark.services] if form in SERVERS else []
                if (form, point, nth) not in QUICK:
                    marks.append(pytest.mark.full)
                listed.append(pytest.param(form, point, nth, marks=marks, id=f"{form}-{point}-{nth}"))
    return listed


@pytest.mark.parametrize(("form", "point", "nth"), cases())
async def test_killed_at_a_point_every_effect_happens_once(form: str, point: str, nth: int, tmp_path: Path) -> None:
    async with place(form, tmp_path) as where:
        done = kill_at(where, point, nth, NUMBERS)
        finish(where, NUMBERS, done)
        check(where, NUMBERS)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=[pytest.mark.services, pytest.mark.full] if form in SERVERS else [])
        for form in POINTS_OF
    ],
)
async def test_the_matrix_has_every_point_that_a_run_reaches(form: str, tmp_path: Path) -> None:
    async with place(form, tmp_path) as where:
        code, facts = run(where, NUMBERS)
        assert code == 0
        check(where, NUMBERS)
        counts = reached(facts)
    assert set(counts) == set(POINTS_OF[form])
    assert {point: count for point, count in counts.items() if count < max(TIMES)} == {}


def test_every_point_is_in_the_matrix() -> None:
    assert {point for points in POINTS_OF.values() for point in points} == set(POINTS) - set(TICK_POINTS)


def test_the_quick_part_is_part_of_the_matrix() -> None:
    assert {(form, point) for form, point, _ in QUICK} <= {(form, p) for form in POINTS_OF for p in POINTS_OF[form]}
    assert {point for _, point, _ in QUICK} == set(POINTS) - set(TICK_POINTS), (
        "each point is killed at in the default tier"
    )
