"""Sending, scenario by scenario (exactly-once.md, "Scenarios to replay, by name")."""

from typing import Any

import msgspec

from faregate.core.recipients import RecipientLists
from faregate.core.sealing import outbox_row
from tests.simulation.scenario import Mode, Scenario
from tests.simulation.tiers import explored, in_every_mode, limits, with_tokens
from tests.simulation.world import World


def one(world: World) -> None:
    world.order()


def two_outputs(world: World) -> None:
    world.runs.outputs = 2
    world.order()


def of_one_key(world: World) -> None:
    world.runs.outputs = 2
    world.order("x", key="k")
    world.order("y", key="k")


def left_behind(world: World) -> None:
    """A process died after its commit: a Bill is in the outbox."""
    envelope = world.envelope("Bill", b'{"name":"x","run":0}', "b")
    envelope = msgspec.structs.replace(envelope, source="a", recipients=())
    world.expect("b", envelope)

    async def put() -> None:
        transaction = world.store.transaction()
        await transaction.begin()
        await transaction.send([outbox_row("a", envelope)])
        await transaction.commit()

    world.loop.run(put())


@limits
def test_late_token_create_after_consumption(limit: int) -> None:
    scenario = Scenario(
        left_behind,
        "separate",
        processes=1,
        starting=True,
        in_exploration=("a", "b"),
        faults=1,
        modes={"tokens.create": ("late", "lose")},
    )
    explored(scenario, limit, 25)


@limits
@in_every_mode
def test_crash_after_sending(mode: Mode, limit: int) -> None:
    scenario = Scenario(one, mode, processes=1, crashes=2, in_exploration=("a", "b"), deviations=2, every_point=True)
    explored(scenario, limit, 2, guide=["deliver a#0", "P0@bus.after-publish", "crash P0"])


@limits
@in_every_mode
def test_order_per_key_across_crashes(mode: Mode, limit: int) -> None:
    """Orders go by the ledger, so that the next one is handled while the bills of the one before are being sent."""
    scenario = Scenario(of_one_key, mode, processes=1, crashes=2, deviations=4, foreign=True)
    explored(scenario, limit, 100)


@limits
@in_every_mode
def test_two_dispatchers_race(mode: Mode, limit: int) -> None:
    """For resolving, for choosing the attempt (D3), and for sending."""
    explored(Scenario(left_behind, mode, starting=True, crashes=1), limit, 50)


@limits
@in_every_mode
def test_two_dispatchers_look_at_one_outbox(mode: Mode, limit: int) -> None:
    explored(Scenario(one, mode, faults=2, looks=True), limit, 30)


@limits
def test_partial_token_creation(limit: int) -> None:
    modes = {"tokens.create": ("fail", "lose", "late")}
    explored(Scenario(two_outputs, "separate", processes=1, crashes=1, faults=2, modes=modes), limit, 100)


@limits
@in_every_mode
def test_partial_send(mode: Mode, limit: int) -> None:
    modes = {"transport.publish": ("lose", "fail")}
    explored(Scenario(two_outputs, mode, processes=1, crashes=1, faults=2, modes=modes), limit, 40)


@limits
@in_every_mode
def test_broker_down_after_commit(mode: Mode, limit: int) -> None:
    modes = {"transport.publish": ("fail",)}
    explored(Scenario(one, mode, faults=3, modes=modes, preemptions=1), limit, 4)


@limits
@with_tokens
def test_subscriber_added_and_removed_between_retries(mode: Mode, limit: int) -> None:
    def begin(world: World) -> None:
        world.runs.notes = True
        world.order()

    def check(world: World) -> None:
        sent = {envelope.publication_id for envelope, node in world.broker.signals if node == "c"}
        handled = world.query("select count(*) from effects where node = 'c'")[0][0]
        assert handled == len(sent) <= 1, f"{len(sent)} publications went to c, and it handled {handled}"

    def subscribe(world: World) -> Any:
        world.broker.routes["Noted"] = ["c"]
        return RecipientLists(world.directory()).subscribe("event:a.Noted", "c", "tokens")

    def unsubscribe(world: World) -> Any:
        return RecipientLists(world.directory()).unsubscribe("event:a.Noted", "c")

    scenario = Scenario(
        begin,
        mode,
        subscriber=True,
        operator=(subscribe, unsubscribe),
        check=check,
        faults=1,
        modes={"transport.publish": ("lose", "fail")},
        preemptions=3,
        deviations=4,
    )
    explored(scenario, limit, 100)


@limits
@in_every_mode
def test_unroutable_recipient(mode: Mode, limit: int) -> None:
    def begin(world: World) -> None:
        world.runs.to = "nobody"
        world.order()

    scenario = Scenario(begin, mode, crashes=1, without_attempts=True)
    explored(scenario, limit, 12)


@limits
@with_tokens
def test_recipient_changes_its_mode_while_messages_are_in_flight(mode: Mode, limit: int) -> None:
    def change(new: Any) -> Any:
        return lambda world: RecipientLists(world.directory()).subscribe("command:b.Bill", "b", new)

    scenario = Scenario(
        one,
        mode,
        processes=2,
        in_exploration=("a", "b"),
        operator=(change("ledger"), change("tokens")),
        without_attempts=True,
        crashes=1,
    )
    explored(scenario, limit, 100)
