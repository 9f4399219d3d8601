"""Handlers on Spark: one node from the log view, its effects, outputs, failures, order."""

import pytest

from tests.spark.run_rig import Shop, the_shop

__all__ = ["the_shop"]
pytestmark = pytest.mark.services


def test_a_node_runs_on_spark_and_its_effects_and_outputs_happen_once(the_shop: Shop) -> None:
    the_shop.place(20)
    run = the_shop.run_to_end()
    the_shop.check(20)
    assert run.outcomes["handled"] == 20
    the_shop.run_to_end()
    the_shop.check(20)
