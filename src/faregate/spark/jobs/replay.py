"""Replay: a filtered range of the log back onto the bus: appended to the log, and so into queues.

Rules kept here:
- `identity="same"`: the same publications, under a replay number that no copy had, so that the broker's window lets
  them pass. A ledger recognises what was handled (a duplicate), a dead letter runs again. Without a ledger it
  all runs again: messages with tokens are refused, since nothing would recognise them.
- `identity="new"`: new publications, derived from the original and the replay's name, that say in a header what they
  were. They are handled as any other.
- Each goes to those it went to, or to `recipients`, and at once: delays and expiries are over.
- Bounded batches, each named after the replay and after what it replays: repeating a replay of one name
  repeats nothing, and another range or choice under that name is another replay.
- A named replay has an end that stays: what it sends would otherwise be part of it when it is repeated.
- Replay numbers start at a million: those of dead letters (docs/dead-letters.md) count from one and never meet them.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from faregate import ids
from faregate.columns import to_envelopes
from faregate.errors import ConfigurationError
from faregate.message import Envelope
from faregate.ports.log import LogPart
from faregate.spark.jobs.settlements import JournalPlan, by_task, plan_journal
from faregate.spark.logs import open_appendable, open_log
from faregate.spark.source.bounds import ALLOWED, AtTime, MalformedBound, parse_bounds, resolve
from faregate.spark.source.reading import chosen

REPLAYED_FROM = "faregate-replayed-from"
"""The header of a message under a new identity: the publication id of the original."""
FIRST_NUMBER = 1_000_000
MOST_IN_A_BATCH = 100_000
_NAME = re.compile(r"[A-Za-z0-9_-]{1,60}")
_LISTED = "offset long, publication_id string, type string, source string, recipients array<string>, token boolean"
ReplayIdentity = Literal["same", "new"]


@dataclass(frozen=True)
class Replayed:
    """What a replay did, or would do."""

    counts: dict[str, int]
    """messages, batches, number (the replay number, 0 under a new identity), from_offset, to_offset."""
    name: str
    messages: DataFrame
    """offset, publication_id, type, source, recipients, token: what fits."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which messages are meant. Plain values: it travels to tasks."""

    types: tuple[str, ...]
    nodes: tuple[str, ...]
    recipients: tuple[str, ...]

    def filtered(self, batch: Any) -> Any:
        found = chosen(batch, self.types, self.nodes)
        return found if self.recipients else found.filter(pc.greater_equal(found.column("topic"), 0))


def replay(
    spark: SparkSession,
    *,
    journal: str | Path,
    start: int | str = "earliest",
    end: int | str = "latest",
    types: Sequence[str] = (),
    nodes: Sequence[str] = (),
    recipients: Sequence[str] = (),
    identity: ReplayIdentity = "same",
    name: str | None = None,
    batch: int = 10_000,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Replayed:
    """Put the messages from `start` up to `end` (offsets, or times as in `startingOffsets`) on the bus again.

    `types`, `nodes` (who published) choose; `recipients` says who gets them instead of those who did, also a node that
    was not there then. `dry_run` counts only. Durable when it returns; delivered by the process that runs the nodes.
    `name`: repeating the same replay under it repeats nothing; it needs an `end` that stays. `batch`: messages that are
    appended as one. Raises `ConfigurationError`, `JournalNotFound` and their like.
    """
    if not 1 <= batch <= MOST_IN_A_BATCH:
        raise ConfigurationError(f"batch={batch} is no size of a batch: use 1 to {MOST_IN_A_BATCH:,} messages")
    if identity not in ("same", "new"):
        raise ConfigurationError(f"the identity {identity!r} is none: 'same' or 'new'")
    choice = Choice(tuple(types), tuple(nodes), tuple(recipients))
    plan = _plan(journal, start, end, choice.recipients)
    chosen_name = name or ids.root_id()
    if not _NAME.fullmatch(chosen_name):
        raise ConfigurationError(f"the replay's name {name!r} is none: use 1 to 60 letters, digits, '_' or '-'")
    bounds = (plan.segments[0].start, plan.segments[-1].end) if plan.segments else (plan.latest, plan.latest)
    if name is not None:
        _check_end(end, plan)
    listed = by_task(spark, plan.segments, lambda segment: _listed(plan, segment, choice), _LISTED)
    counted = listed.agg(F.count("*").alias("n"), F.sum(F.col("token").cast("long")).alias("t")).collect()[0]
    total, tokens = counted["n"], counted["t"] or 0
    if tokens and identity == "same":
        raise ConfigurationError(
            f"{tokens} of the {total} messages were sent with tokens (dedup='tokens'): nothing remembers that they "
            "were handled, and under the same identity they would run again. Leave them out by types, or use a new "
            "identity"
        )
    number = _number(spark, plan) if identity == "same" else 0
    counts = {"messages": total, "batches": 0, "number": number, "from_offset": bounds[0], "to_offset": bounds[1]}
    if not dry_run:
        made = (_again(each, choice, number, chosen_name) for each in _chosen(plan, choice))
        told = repr((bounds, choice, identity, batch)).encode()
        stem = f"replay-{chosen_name}-{sha256(told).hexdigest()[:16]}"
        log, done = open_appendable(plan.path), 0
        while piece := list(islice(made, batch)):
            log.append(piece, f"{stem}-{counts['batches']:08d}")
            done += len(piece)
            counts["batches"] += 1
            progress(done, total)
    return Replayed(counts, chosen_name, listed.drop("token"))


def _check_end(end: int | str, plan: JournalPlan) -> None:
    """Raises `ConfigurationError` for an end that is another one once the log has grown."""
    bound = parse_bounds(str(end)).of("0")
    if isinstance(bound, AtTime):
        moves = bound.seconds > time.time()
    else:
        moves = bound == "latest" or (isinstance(bound, int) and bound > plan.latest)
    if moves:
        raise ConfigurationError(
            f"the replay has a name, and its end {end!r} moves as the log grows, so a repetition would be another "
            f"replay: give an end that stays; the log ends at offset {plan.latest} now"
        )


def _plan(journal: str | Path, start: int | str, end: int | str, recipients: Sequence[str]) -> JournalPlan:
    whole = plan_journal(journal)
    known = ", ".join(whole.nodes) or "none"
    for node in recipients:
        if node not in whole.nodes:
            raise ConfigurationError(f"no node {node!r} takes messages of this log; there are {known}")
    reader = open_log(whole.path)
    bounds = []
    for what, value in (("start", start), ("end", end)):
        try:
            bounds.append(resolve(parse_bounds(str(value)).of("0"), reader))
        except (MalformedBound, KeyError) as exc:
            raise ConfigurationError(f"the {what} {value!r} is no bound: allowed are {ALLOWED}") from exc
    if str(start).isdecimal() and bounds[0] < whole.earliest:
        raise ConfigurationError(
            f"offset {bounds[0]} was removed by retention: {reader.name} begins at {whole.earliest}"
        )
    if bounds[0] > bounds[1]:
        raise ConfigurationError(f"the start, offset {bounds[0]}, lies behind the end, offset {bounds[1]}")
    return plan_journal(journal, *bounds)


def _number(spark: SparkSession, plan: JournalPlan) -> int:
    """A replay number that nothing from the range's start on has."""
    whole = plan_journal(plan.path, plan.segments[0].start if plan.segments else plan.latest)

    def highest(segment: LogPart) -> Iterator[Any]:
        for batch in open_log(whole.path).batches(segment.start, segment.end):
            yield pa.RecordBatch.from_arrays(
                [pa.array([pc.max(batch.column("replay")).as_py() or 0], pa.int32())], ["n"]
            )

    found = by_task(spark, whole.segments, highest, "n int").agg(F.max("n")).collect()[0][0] or 0
    return max(FIRST_NUMBER, int(found)) + 1


def _listed(plan: JournalPlan, segment: LogPart, choice: Choice) -> Iterator[Any]:
    for stored in open_log(plan.path).batches(segment.start, segment.end):
        batch = choice.filtered(stored)
        names = ["offset", "publication_id", "type", "source", "recipients"]
        columns = [batch.column(name) for name in names]
        if choice.recipients:
            columns[4] = pa.array([list(choice.recipients)] * batch.num_rows, pa.list_(pa.string()))
        columns.append(pc.is_valid(batch.column("attempt_id")))
        yield pa.RecordBatch.from_arrays(columns, names=[*names, "token"])


def _chosen(plan: JournalPlan, choice: Choice) -> Iterator[Envelope]:
    reader = open_log(plan.path)
    for segment in plan.segments:
        for stored in reader.batches(segment.start, segment.end):
            yield from to_envelopes(choice.filtered(stored))


def _again(envelope: Envelope, choice: Choice, number: int, name: str) -> Envelope:
    """As it is sent: under the replay's number, or, without one, under an identity of its own."""
    changes: dict[str, Any] = {"recipients": choice.recipients or envelope.recipients, "replay": number}
    if not number:
        original = envelope.publication_id
        changes["publication_id"] = ids.publication_id(
            correlation_id=envelope.correlation_id or original,
            node=envelope.source,
            causation_id=original,
            handler=REPLAYED_FROM,
            type=envelope.type,
            slot=f"replay {name}",
        )
        changes |= {"headers": {**envelope.headers, REPLAYED_FROM: original}, "attempt_id": None}
        changes["sent_at"] = time.time()
    return msgspec.structs.replace(envelope, deliver_at=None, expires_at=None, redeliveries=0, **changes)
