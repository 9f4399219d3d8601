"""What people do, scenario by scenario (exactly-once.md, "Scenarios to replay, by name").

Left out, with the reason:
- payload missing though the token is there, and payloads in general: there are no payload stores in this version
- breaker trips mid-flight: there is no breaker in this version
- duplicate-key detection by SQLSTATE: a matter of one adapter, tested in tests/stores
- "claim object deleted before the token" (a mutation): there are no object stores in this version
"""

from faregate import ids
from faregate.bus.dead_letters import DeadLetters
from faregate.errors import Permanent
from faregate.node.outgoing import send
from tests.simulation.nodes import Bill
from tests.simulation.process import SimProcess
from tests.simulation.scenario import Mode, Scenario
from tests.simulation.tiers import explored, in_every_mode, limits
from tests.simulation.world import World


def dies_first(world: World) -> None:
    world.runs.script = lambda node, run, name: Permanent("never") if (node, run) == ("a", 1) else None
    world.order(copies=2)


def letters(world: World) -> DeadLetters:
    return DeadLetters([world.store], world.clock)


async def replay_all(world: World) -> None:
    for letter in world.dead_letters():
        if letter.status == "open":
            await letters(world).decide([letter.message_id], "replayed", "ann")


async def discard_all(world: World) -> None:
    for letter in world.dead_letters():
        if letter.status in ("open", "replayed"):
            await letters(world).decide([letter.message_id], "discarded", "ann")


async def edit_all(world: World) -> None:
    for letter in world.dead_letters():
        if letter.status == "open":
            envelope = await letters(world).edit(letter.message_id, '{"name":"edited"}', "ann")
            world.expect("a", envelope)


@limits
@in_every_mode
def test_a_dead_letter_replayed_later_original_copy_arrives_too(mode: Mode, limit: int) -> None:
    explored(Scenario(dies_first, mode, operator=(replay_all,), crashes=1, without_attempts=True), limit, 100)


@limits
@in_every_mode
def test_edit_and_replay_gets_a_new_identity_while_the_original_lives(mode: Mode, limit: int) -> None:
    def begin(world: World) -> None:
        world.runs.script = lambda node, run, name: Permanent("never") if name == "x" else None
        world.order(copies=2)

    explored(Scenario(begin, mode, operator=(edit_all,), crashes=1, without_attempts=True), limit, 60)


@limits
@in_every_mode
def test_operator_discard_consumes_everything(mode: Mode, limit: int) -> None:
    scenario = Scenario(dies_first, mode, operator=(replay_all, discard_all), crashes=1, without_attempts=True)
    explored(scenario, limit, 100)


@limits
def test_discard_meets_the_sending_of_a_replay(limit: int) -> None:
    scenario = Scenario(
        dies_first, "separate", operator=(replay_all, discard_all), crashes=1, without_attempts=True, deviations=2
    )
    guide = ["deliver a#0", "P0@tokens.discard", "operator 0", "crash P0", "P0'@store.choose_attempts", "operator 1"]
    explored(scenario, limit, 2, guide=guide)


@limits
@in_every_mode
def test_one_duplicate_inside_a_batch_does_not_fail_its_neighbours(mode: Mode, limit: int) -> None:
    def begin(world: World) -> None:
        world.runs.script = lambda node, run, name: OSError("once") if (node, run, name) == ("a", 1, "z") else None
        for name in "xyz":
            world.order(name)
        world.broker.put(world.broker.copies[1].envelope, "a")

    def writing(world: World) -> None:
        world.runs.writes = True
        begin(world)

    batch = 1 if mode == "separate" else 3  # the bus itself takes one at a time where the gate has to be asked
    explored(Scenario(begin, mode, batch=batch, crashes=1, deviations=2), limit, 30)
    if batch > 1:
        explored(Scenario(begin, mode, batch=batch, savepoints=False, crashes=1, deviations=2), limit, 30)
        explored(Scenario(writing, mode, batch=batch, savepoints=False, crashes=1, deviations=2), limit, 30)


@limits
def test_store_restored_from_an_older_backup(limit: int) -> None:
    """What was committed since the backup is gone; whatever comes again is handled again, and once."""

    def begin(world: World) -> None:
        world.runs.outputs = 0
        world.order(copies=2)

    def restore(world: World) -> None:
        if not world.store._database.writer.in_transaction:
            world.empty()

    def come_again(world: World) -> None:
        world.broker.put(world.broker.copies[0].envelope, "a")

    explored(Scenario(begin, "ledger", operator=(restore,), deviations=2, at_rest=come_again), limit, 30)


@limits
def test_replay_from_below_the_retention_floor(limit: int) -> None:
    """Nobody remembers it any more: it is a dead letter, and not handled twice."""

    def begin(world: World) -> None:
        world.runs.outputs = 0  # what has outputs in the outbox is not evicted
        world.order(copies=2)
        world.clock.jump(1000.0)

    def age(world: World) -> None:
        world.clock.jump(200.0)

    scenario = Scenario(begin, "ledger", retain_ledger=100.0, operator=(age,), sweeps=1, below_floor=True)
    explored(scenario, limit, 60)


@limits
@in_every_mode
def test_repeated_post_at_the_http_boundary(mode: Mode, limit: int) -> None:
    async def post(process: SimProcess) -> None:
        bill = send(Bill(name="x", run=0), to="b", idempotency_key="the key")
        await process.senders["a"].publish(bill)[1]

    def begin(world: World) -> None:
        world.published.add(("b", ids.message_id(ids.idempotent_id("a", "Bill", "the key"), "b")))

    scenario = Scenario(begin, mode, actors=(post, post), in_exploration=("a", "b"), faults=1, looks=True)
    explored(scenario, limit, 30)
