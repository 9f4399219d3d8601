"""The eight invariants of exactly-once.md and one of Spark's, watched while a schedule runs and checked when everything
is at rest.

1 at most one business commit per message id          5 outputs come from the try that committed
2 every token signal sent carries a chosen attempt    6 at rest no token, claim, outbox row remains
3 one chosen set per outbox row                       7 published = handled + skipped + dead, per recipient
4 token deleted implies all outputs sent              8 per key, positions commit in order, over a hop too
9 who reads a position of a key to change it, or parks a message of a key, holds the lock of the key's bucket
"""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec

from faregate import ids
from faregate.message import Envelope
from faregate.spark.runs.rows import bucket_of
from tests.simulation.nodes import Bill

if TYPE_CHECKING:
    from tests.simulation.world import World


class Violation(AssertionError):
    """An invariant does not hold. The explorer adds the schedule."""

    def __init__(self, invariant: int, text: str) -> None:
        super().__init__(f"invariant {invariant}: {text}")
        self.invariant = invariant


class Audit:
    def __init__(self, world: "World") -> None:
        self._world = world
        self.chosen: dict[int, tuple[str, ...]] = {}
        self.signalled: dict[tuple[str, str, int], set[str | None]] = defaultdict(set)
        self.broken: list[Violation] = []
        """Found while it ran; told at the end, so that no code under test can catch it."""

    def breach(self, invariant: int, text: str) -> None:
        self.broken.append(Violation(invariant, text))

    # --- while it runs ---

    def watch(self, call: str, args: tuple[Any, ...], result: Any) -> None:
        if call == "store.choose_attempts" and result:
            seq, _, chosen = args
            if self.chosen.setdefault(seq, tuple(chosen)) != tuple(chosen):
                self.breach(3, f"row {seq} chose {self.chosen[seq]}, then {chosen}")
        elif call == "tokens.delete":
            self._check_sent(args[0])
        elif call == "tokens.discard" and self._world.scenario.spark is not None:
            # A bus discards tokens of what a person gave up, too; a claim keeps that what was done is sent.
            for attempt in args[0]:
                self._check_sent(attempt)
        elif call in ("store.positions", "store.advance", "store.park"):
            self._check_locked(call, *args, result)

    def _check_locked(self, call: str, handler: str, keys: list[str], locked: set[int]) -> None:
        for key in keys if handler else ():  # without one it is a low-water mark
            if bucket_of(handler.partition("@")[0], key) not in locked:
                self.breach(9, f"{call} of key {key} of {handler} without the lock of its bucket")

    def _check_sent(self, attempt: str) -> None:
        """Whose token goes has sent everything."""
        message_id = self._world.messages_of.get(attempt)
        if message_id is None or self._world.count_tokens(attempt):
            return
        sent = {(envelope.publication_id, node) for envelope, node in self._world.broker.signals}
        for envelope in self._world.outbox_of(message_id):
            node = envelope.destination or ""
            if (envelope.publication_id, node) not in sent and node in self._world.nodes:
                self.breach(4, f"the token of {message_id} is gone, and {envelope} was not sent")

    def on_signal(self, envelope: Envelope, node: str) -> None:
        attempt = envelope.attempt_id
        if attempt is not None:
            message_id = ids.message_id(envelope.publication_id, node)
            self._world.messages_of[attempt] = message_id
            if not self._world.merged and all(attempt not in chosen for chosen in self.chosen.values()):
                self.breach(2, f"{envelope} was sent with {attempt}, which is not chosen")
        elif self._world.tokens is not None and not self._world.scenario.without_attempts and node in "ab":
            self.breach(2, f"{envelope} was sent without an attempt")
        attempts = self.signalled[envelope.publication_id, node, envelope.replay]
        attempts.add(attempt)
        if len(attempts) > 1:
            self.breach(3, f"{envelope} was sent to {node} with {sorted(map(str, attempts))}")

    # --- at rest ---

    def check(self) -> None:
        if self.broken:
            raise self.broken[0]
        world = self._world
        effects = world.query("select node, message_id, run, key, position, name from effects order by number")
        self._once(effects)
        self._from_the_committed_try(effects)
        self._nothing_left()
        self._balance(effects)
        self._order(effects)

    def _once(self, effects: list[tuple[Any, ...]]) -> None:
        runs: dict[tuple[str, str], list[int]] = defaultdict(list)
        for node, message_id, run, *_ in effects:
            runs[node, message_id].append(run)
        for (node, message_id), found in runs.items():
            if len(found) > 1:
                raise Violation(1, f"{message_id} was committed {len(found)} times at {node}, by runs {found}")

    def _from_the_committed_try(self, effects: list[tuple[Any, ...]]) -> None:
        run_of = {message_id: run for node, message_id, run, *_ in effects if node == "a"}
        for envelope, _ in self._world.broker.signals:
            if envelope.type != "Bill" or envelope.causation_id is None or envelope.replay:
                continue
            run = msgspec.json.decode(envelope.body, type=Bill).run
            committed = run_of.get(envelope.causation_id)
            if committed is None:
                raise Violation(5, f"{envelope} was sent by run {run}, and nothing was committed (a ghost)")
            if committed != run:
                raise Violation(5, f"{envelope} was sent by run {run}, and committed was {committed}")

    def _nothing_left(self) -> None:
        for table in ("faregate_outbox", "faregate_claims", "faregate_tokens", "faregate_parked"):
            left = self._world.query(f"select * from {table}", everywhere=True)
            if left:
                raise Violation(6, f"{len(left)} rows are left in {table}: {left}")
        for copy in self._world.broker.unsettled():
            raise Violation(6, f"{copy} is not settled")

    def _balance(self, effects: list[tuple[Any, ...]]) -> None:
        world = self._world
        handled = {(node, message_id) for node, message_id, *_ in effects}
        dead = {(letter.node, letter.message_id): letter for letter in world.dead_letters()}
        expected = set(world.published)
        for message_id in [message_id for node, message_id in handled if node == "a"]:
            expected |= world.outputs_of(message_id)
        for where in expected:
            letter = dead.get(where)
            is_dead = letter is not None and letter.status in ("open", "discarded")
            if letter is not None and letter.reason == "failed":  # no script makes a handler fail that often
                raise Violation(7, f"{where[1]} at {where[0]} failed again and again: {letter.error.splitlines()[0]}")
            if letter is not None and letter.status == "replayed":
                raise Violation(7, f"{where[1]} at {where[0]} was replayed, and nothing came of it")
            if (where in handled) == is_dead and not (is_dead and world.scenario.below_floor):
                what = "handled and dead" if is_dead else "neither handled nor dead"
                raise Violation(7, f"{where[1]} at {where[0]} is {what}")
        for where in {each for each in handled - expected if each[0] != "c"}:
            raise Violation(7, f"{where[1]} at {where[0]} was handled, and never published")

    def _order(self, effects: list[tuple[Any, ...]]) -> None:
        last: dict[tuple[str, str], int] = {}
        for node, message_id, _, key, position, _ in effects:
            if key is None or position is None or (node == "a" and self._world.scenario.lax):
                continue
            if position < last.get((node, key), -1):
                raise Violation(8, f"{message_id} of key {key} was committed after a later one")
            last[node, key] = position
        if self._world.scenario.processes == 1:  # two have a dispatcher each, and those do not wait for each other
            self._order_over_a_hop(effects)

    def _order_over_a_hop(self, effects: list[tuple[Any, ...]]) -> None:
        """What the orders of one key sent is handled in the order in which those were committed."""
        committed = {name: place for place, (node, *_, name) in enumerate(effects) if node == "a"}
        last: dict[str, tuple[int, int]] = {}
        for node, message_id, _, key, _, name in effects:
            if node == "b" and key is not None:
                order, number = name.split(".")
                place = (committed[order], int(number))
                if place < last.get(key, place):
                    raise Violation(8, f"{name} ({message_id}) of key {key} was handled after what was sent later")
                last[key] = place
