"""Handlers on Spark: one node from the log view, its effects, outputs, failures, order."""

import threading

import pytest

import faregate as fg
from tests.spark.run_rig import Shop, the_shop

__all__ = ["the_shop"]
pytestmark = pytest.mark.services


def test_a_node_runs_on_spark_and_its_effects_and_outputs_happen_once(the_shop: Shop) -> None:
    the_shop.place(20)
    run = the_shop.run_to_end()
    the_shop.check(20)
    assert run.outcomes["handled"] == 20
    the_shop.place(4)
    assert the_shop.run_to_end().outcomes == {"handled": 4}
    the_shop.check(24)
    assert the_shop.rows("select count(*) from faregate_outbox") == [(24,)] or the_shop.rows(
        "select count(*) from faregate_dead where reason = 'unroutable'"
    ) == [(24,)], "nobody handles ChargeCard here: each is a dead letter of its own"


def test_a_message_that_fails_is_parked_and_keeps_its_key_waiting(the_shop: Shop) -> None:
    the_shop.place(12)
    for more in ("", "-again"):
        the_shop.arm(1, more=more)
    run = the_shop.run_to_end()
    assert run.outcomes["redelivered"] == 1 and run.outcomes["parked"] == 2
    the_shop.check(12, but={1, 5, 9})
    assert sorted(the_shop.rows("select tries, position is not null from faregate_parked")) == [(0, 1), (0, 1), (1, 1)]
    the_shop.place(4)
    the_shop.make_due()
    run = the_shop.run_to_end()
    the_shop.check(16)
    assert the_shop.rows("select count(*) from faregate_parked") == [(0,)]


def test_what_cannot_be_handled_is_a_dead_letter_and_the_batch_goes_on(the_shop: Shop) -> None:
    the_shop.place(2)
    the_shop.place(1, total=-1)
    the_shop.place(5)
    run = the_shop.run_to_end()
    assert run.outcomes == {"handled": 7, "dead": 1}
    the_shop.check(8, but={2})
    assert the_shop.rows(
        "select node, reason, status from faregate_dead where node = 'billing' and key is not null"
    ) == [("billing", "permanent", "open")]


@pytest.mark.full
def test_the_shop_on_both_engines_does_the_same(the_shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = Shop(tmp_path_factory.mktemp("asyncio"), the_shop.spark)
    other.token = the_shop.token
    for _ in range(2):
        other.run_bus("shop", "billing", "payments", "shipping")
        if not other.placed:
            other.place(12)
    # In the order of the flow, so that each node is known before it is sent something.
    the_shop.place(0)
    for node in ("shipping", "payments", "billing"):
        the_shop.run_to_end(node)
    the_shop.place(12)
    for node in ("billing", "payments", "shipping"):
        the_shop.run_to_end(node)
    for table in ("invoices", "charges", "parcels"):
        the_shop.check(12, table)
        assert sorted(the_shop.effects(table)) == sorted(other.effects(table))
    for type in ("ChargeCard", "CardCharged", "OrderShipped"):
        assert _messages(the_shop, type) == _messages(other, type)


def _messages(shop: Shop, type: str) -> list[tuple[str, str, bytes]]:
    found = [(each.publication_id, each.correlation_id, each.body) for each in shop.log(type)]
    assert len({each[0] for each in found}) == len(found)
    return sorted(found)


def test_a_bus_and_spark_do_not_consume_one_subscription(the_shop: Shop) -> None:
    the_shop.run_bus("shop", "billing")
    with pytest.raises(fg.ViewTaken, match=r"faregate spark handover MODULE:BUS billing --to log"):
        the_shop.run()
    the_shop.run_to_end(handover=True)
    with pytest.raises(fg.ViewTaken, match=r"faregate spark handover MODULE:BUS billing --to queue"):
        the_shop.run_bus("shop", "billing")


def test_a_node_that_no_module_holds_is_refused(the_shop: Shop) -> None:
    node = fg.Node("local")
    with pytest.raises(fg.ConfigurationError, match="no module holds it: put it, with its messages and handlers"):
        fg.spark.run(node, the_shop.spark, source=the_shop.journal, store=the_shop.store, checkpoint=the_shop.folder)


def test_parked_messages_run_between_batches_and_a_stop_is_clean(the_shop: Shop) -> None:
    the_shop.place(4)
    for more in ("", "-again"):
        the_shop.arm(2, more=more)
    seen: list[fg.spark.RunProgress] = []
    all_handled = threading.Event()

    def see(progress: fg.spark.RunProgress) -> None:
        seen.append(progress)
        if sum(each.outcomes.get("handled", 0) for each in seen) >= 4:
            all_handled.set()

    run = the_shop.run(trigger="200ms", on_progress=see)
    assert all_handled.wait(120)
    run.stop()
    the_shop.check(4)
    assert [progress.outcomes for progress in seen if progress.batch is None] == [{"handled": 1}]
    assert the_shop.run_to_end().outcomes == {}
