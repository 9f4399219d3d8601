"""How many schedules a test explores: some in every run, many more in the long tier (`./dev test --long`)."""

from collections.abc import Sequence

import pytest

from tests.simulation.explorer import Report, explore
from tests.simulation.scenario import Mode, Scenario

SHORT, LONG = 120, 2500
SHORT_ON_SPARK = 40
"""A schedule there takes three times as long."""
MODES: tuple[Mode, ...] = ("ledger", "merged", "separate")
TOKENS: tuple[Mode, ...] = ("merged", "separate")

limits = pytest.mark.parametrize(
    "limit", [pytest.param(SHORT, id="short"), pytest.param(LONG, id="long", marks=pytest.mark.full)]
)
limits_on_spark = pytest.mark.parametrize(
    "limit", [pytest.param(SHORT_ON_SPARK, id="short"), pytest.param(LONG, id="long", marks=pytest.mark.full)]
)
in_every_mode = pytest.mark.parametrize("mode", MODES)
with_tokens = pytest.mark.parametrize("mode", TOKENS)


def explored(scenario: Scenario, limit: int, least: int, *, guide: Sequence[str] = ()) -> Report:
    """Explore; nothing is violated, and it were at least so many schedules, or as many as the limit allows."""
    report = explore(scenario, limit, guide=guide)
    print(f"{scenario.mode}: {report}")
    assert report.schedules >= min(least, limit), f"only {report}"
    return report
