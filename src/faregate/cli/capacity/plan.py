"""What a load needs: how many of each part, where each part stops, and how many bytes.

One rule for all parts: one of it takes so many messages a second, by the tightest of its limits; so many are needed;
and where a design has only so many of it, more of the rest does not help: the load has to be shared by several such
designs, shards, that share nothing. What one takes is computed from costs by a sum, which is shown as it is computed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from faregate.cli.capacity.costs import Costs
from faregate.cli.capacity.load import Load
from faregate.cli.capacity.words import bytes_of, counted_days, figure, percent
from faregate.errors import ConfigurationError
from faregate.ids import SLOTS
from faregate.ports.store import BUCKETS
from faregate.units import counted

DAY = 86_400


class Limit(NamedTuple):
    rate: float
    """Messages a second, of those that reach the part."""
    how: str


@dataclass(frozen=True)
class Part:
    name: str
    limits: tuple[Limit, ...]
    then: str
    """What to do where it stops, or that more of it are enough."""
    share: float = 1.0
    """The share of the load that reaches it."""
    each: int = 1
    """So many times: once for each node that handles the messages."""
    most: int | None = None
    """In one shard, for each node."""
    is_sharded: bool = True
    """Whether several shards share its load. If not, there is one, whatever the load."""
    least: int = 1

    @property
    def limit(self) -> Limit:
        return min(self.limits)

    def needed(self, rate: float, shards: int) -> int:
        """What a shard has one of is there in each shard, however little it has to do."""
        if not self.is_sharded:
            return 1
        least = max(self.least, shards) if self.most == 1 else self.least
        return max(least, math.ceil(rate * self.share / self.limit.rate)) * self.each

    @property
    def full_at(self) -> float:
        """The rate of the whole load at which one of it, for each node, is full."""
        return self.limit.rate / self.share

    @property
    def stops_at(self) -> float:
        """The rate of the whole load where one shard can have no more of it."""
        return math.inf if self.most is None else self.full_at * self.most


class Amount(NamedTuple):
    name: str
    bytes: float
    is_rate: bool
    """Bytes a second."""
    how: str


@dataclass(frozen=True)
class Plan:
    load: Load
    parts: tuple[Part, ...]
    amounts: tuple[Amount, ...]

    @property
    def shards(self) -> int:
        return max(1, *(math.ceil(self.load.rate / part.stops_at) for part in self.parts if part.is_sharded))

    @property
    def first_full(self) -> Part:
        """Of one of each."""
        return min(self.parts, key=lambda part: part.full_at)

    @property
    def first_stop(self) -> Part:
        """Where more of the same do not help any more."""
        return min(self.parts, key=lambda part: part.stops_at)

    @property
    def too_hot(self) -> bool:
        """Whether one key is more than anything can take in order."""
        return any(not part.is_sharded and part.stops_at < self.load.rate for part in self.parts)


def make_plan(load: Load, costs: Costs) -> Plan:
    """Raises `ConfigurationError` for figures with which nothing can be computed."""
    planner = _Planner(load, costs)
    engines = {"journal": planner.journal, "rabbitmq": planner.rabbitmq, "spark": planner.spark}
    try:
        plan = Plan(load, tuple(engines[load.engine]()), tuple(planner.amounts()))
        needed = [float(part.needed(load.rate, plan.shards)) for part in plan.parts]
        found = [*needed, *(part.limit.rate for part in plan.parts), *(each.bytes for each in plan.amounts)]
        if not all(map(math.isfinite, found)):
            raise OverflowError
    except ArithmeticError:
        raise ConfigurationError("these figures are too large, or too small, to compute with") from None
    return plan


Terms = dict[str, float]
"""How many times each cost."""


class _Planner:
    def __init__(self, load: Load, costs: Costs) -> None:
        self.load, self.costs = load, costs

    # --- the three engines ---------------------------------------------------------------------------------------

    def journal(self) -> Iterator[Part]:
        load = self.load
        send = "publish" if load.store == "none" else f"send_{load.store}"
        terms = {"publish": 1.0, f"handle_{load.store}": float(load.recipients)}
        terms[send] = terms.get(send, 0.0) + load.recipients * load.sent
        yield Part(
            "journal, and the process that runs it",
            (self.core(terms), self.disk("disk_write", self.journal_bytes())),
            "one process writes a journal: shard by key over several journals, or go to RabbitMQ",
            most=1,
        )
        yield from self.databases()
        yield from self.hottest_key(f"key_{load.store}")

    def rabbitmq(self) -> Iterator[Part]:
        load = self.load
        ordered, free = load.keyed, 1 - load.keyed
        yield self.publishers()
        queue = (self.leader("queue_rate"),)
        handler = (self.core(self.amqp_handling()),)
        one_file = 1 if load.store == "sqlite" else None
        if free:
            yield Part(
                "queue without order",
                queue,
                "a subscription without a key has one queue: give it a key, or divide the message type",
                share=free,
                each=load.recipients,
                most=1,
            )
            yield Part("handler process without order", handler, _MORE, share=free, each=load.recipients, most=one_file)
        if ordered:
            then = f"a key has one of {SLOTS} slots, so there are {SLOTS} partitions at most: shard, or go to Spark"
            yield Part("queue partition", queue, then, share=ordered, each=load.recipients, most=SLOTS)
            then = "one process at a time consumes a partition: as for the partitions"
            yield Part("handler process", handler, then, share=ordered, each=load.recipients, most=one_file or SLOTS)
        yield self.brokers({"queue_in": load.recipients * self.costs["replicas"], "queue_out": load.recipients})
        yield from self.databases()
        yield from self.hottest_key(f"key_{load.store}")

    def spark(self) -> Iterator[Part]:
        load = self.load
        yield self.publishers()
        yield Part(
            "stream",
            (self.leader("stream_rate"), self.disk("disk_write", self.stream_bytes())),
            "a log is one stream with one leader: several streams, each with runs of its own",
            most=1,
        )
        yield self.brokers({"stream_in": self.costs["replicas"], "stream_out": load.recipients})
        if load.store == "none":
            # What it costs was measured with a message sent for each one.
            terms = {"spark_none": max(1.0, load.sent), "stream_read": 1.0}
            yield Part("Spark core", (self.core(terms),), _MORE, each=load.recipients)
        else:
            terms = {"spark_postgresql": 1.0, "stream_read": 1.0, "spark_send": load.sent}
            then = f"a node has {BUCKETS} buckets of keys, a task each: another node, or another stream"
            yield Part("Spark core", (self.core(terms),), then, each=load.recipients, most=BUCKETS)
        if load.sent:
            # Without a store there is no outbox to read: the driver only publishes.
            terms = {"amqp_publish": load.sent} | ({} if load.store == "none" else {"spark_driver": load.sent})
            then = "the driver sends what handlers sent: several streams, each with a run of its own"
            yield Part("Spark driver", (self.core(terms),), then, each=load.recipients, most=1)
        yield from self.databases()
        yield from self.hottest_key(f"spark_{load.store}")

    # --- what several have ---------------------------------------------------------------------------------------

    def publishers(self) -> Part:
        return Part("publishing process", (self.core({"amqp_publish": 1}),), _MORE)

    def amqp_handling(self) -> Terms:
        load = self.load
        if load.store == "none":
            return {"amqp_handle": 1, "amqp_publish": load.sent}
        # What a store adds is the same whatever the queue is.
        return {"amqp_handle": 1, f"handle_{load.store}": 1, "handle_none": -1, f"send_{load.store}": load.sent}

    def brokers(self, terms: Terms) -> Part:
        costs = self.costs
        written = self.logs * costs["replicas"] * self.stream_bytes()
        return Part(
            "RabbitMQ node",
            (
                self.core(terms, cores="broker_cores"),
                self.disk("disk_write", written),
                self.disk("network", self.given() * self.stream_bytes()),
            ),
            "a cluster shares its metadata among all nodes: several clusters, each for some nodes or keys",
            most=max(1, int(costs["brokers"])),
            least=int(costs["replicas"]),
        )

    def databases(self) -> Iterator[Part]:
        load, costs = self.load, self.costs
        if load.store != "postgresql":
            return
        rows = load.ledger_days * DAY * costs["ledger_postgresql"]
        kept = f"{counted_days(load.ledger_days)} of rows of {bytes_of(costs['ledger_postgresql'])}"
        commits = costs["commits"] * costs["messages_per_commit"] * costs["busy"]
        limits = [
            self.core({"database": 1, "database_send": load.sent}, cores="database_cores"),
            Limit(
                commits,
                f"{percent(costs['busy'])} of {figure(costs['commits'])} commits × "
                f"{figure(costs['messages_per_commit'])} messages",
            ),
            self.disk("disk_write", costs["wal"] + load.sent * costs["wal_send"]),
        ]
        if rows:
            limits.append(Limit(costs["database_disk"] / rows, f"{bytes_of(costs['database_disk'])} ÷ {kept}"))
        yield Part(
            "PostgreSQL",
            tuple(limits),
            "a node has one store: keep the ledger for fewer days, then shard the node with its store by key",
            each=load.recipients,
            most=1,
        )

    def hottest_key(self, cost: str) -> Iterator[Part]:
        """Messages of one key are handled one after another: on the bus each has a commit of its own."""
        share = self.load.hottest
        if not share or self.load.store == "none":
            return
        if self.load.engine == "spark":
            limit = self.core({cost: 1, "stream_read": 1, "spark_send": self.load.sent})
            name = "hottest key, in one task"
        else:
            limit = Limit(1_000 / self.costs[cost], f"1 s ÷ {cost} {figure(self.costs[cost])} ms, one by one")
            name = "hottest key"
        then = "one key is one after another, on any number of machines: make its key finer, or its handler faster"
        yield Part(name, (limit,), then, share=share, most=1, is_sharded=False)

    # --- amounts -------------------------------------------------------------------------------------------------

    @property
    def logs(self) -> int:
        """How often the brokers keep a message, before they replicate it: in a queue for each node, or in a stream."""
        return self.load.recipients if self.load.engine == "rabbitmq" else 1

    def given(self) -> float:
        """How often the brokers give a message on: to each node, and to the further replicas."""
        return self.load.recipients + self.logs * (self.costs["replicas"] - 1)

    def journal_bytes(self) -> float:
        return self.load.body + self.costs["journal_bytes"]

    def stream_bytes(self) -> float:
        return self.load.body + self.costs["stream_bytes"]

    def amounts(self) -> Iterator[Amount]:
        load, costs = self.load, self.costs
        rate = figure(load.rate)
        copies = 1.0 if load.engine == "journal" else costs["replicas"]
        one = self.journal_bytes() if load.engine == "journal" else self.stream_bytes()
        times = "" if copies == 1 else f" × {figure(copies)} replicas"
        if load.engine == "rabbitmq":
            kept, name, span = 3_600.0, "queues, if handlers stop for an hour", "an hour"
            copies *= load.recipients
            times += f" × {counted(load.recipients, 'node')}"
        else:
            kept, name, span = load.retain_days * DAY, "log on disk", counted_days(load.retain_days)
        yield Amount(name, load.rate * kept * one * copies, False, f"{rate}/s × {span} × {bytes_of(one)}{times}")
        if load.engine != "journal":
            moves = 1 + self.given()
            yield Amount(
                "network of the brokers, in and out",
                load.rate * one * moves,
                True,
                f"{rate}/s × {bytes_of(one)} × {figure(moves)}: in, to each node, to each further replica",
            )
        if load.store != "none":
            row = costs[f"ledger_{load.store}"]
            rows = load.rate * load.recipients * load.ledger_days * DAY
            yield Amount(
                "ledgers",
                rows * row,
                False,
                f"{figure(rows)} rows of {bytes_of(row)}: {rate}/s × {counted(load.recipients, 'node')} × "
                f"{counted_days(load.ledger_days)}",
            )
        if load.store == "postgresql":
            wal = costs["wal"] + load.sent * costs["wal_send"]
            yield Amount(
                "write-ahead logs of PostgreSQL",
                load.rate * load.recipients * wal,
                True,
                f"{rate}/s × {counted(load.recipients, 'node')} × {bytes_of(wal)}",
            )

    # --- limits --------------------------------------------------------------------------------------------------

    def core(self, terms: Terms, *, cores: str | None = None) -> Limit:
        """So many messages a second keep a core, or the cores of a server, as busy as planned."""
        costs = self.costs
        micros = sum(times * costs[name] for name, times in terms.items())
        count = 1.0 if cores is None else costs[cores]
        having = "a core" if cores is None else f"{figure(count)} cores"
        parts = []
        for name, times in terms.items():
            if times:
                factor = "" if abs(times) == 1 else f"{figure(abs(times))} × "
                parts.append(f"{'- ' if times < 0 else '+ '}{factor}{name} {figure(costs[name])}")
        shown = " ".join(parts).removeprefix("+ ")
        shown = f"({shown})" if len(parts) > 1 else shown
        if micros <= 0:
            raise ConfigurationError(f"these figures do not fit together: {shown} µs is less than nothing")
        return Limit(count * costs["busy"] * 1e6 / micros, f"{percent(costs['busy'])} of {having} ÷ {shown} µs")

    def leader(self, name: str) -> Limit:
        """What one queue or stream takes: its leader is one process of the broker."""
        costs = self.costs
        return Limit(costs["busy"] * costs[name], f"{percent(costs['busy'])} of {name} {figure(costs[name])}/s")

    def disk(self, name: str, size: float) -> Limit:
        """So many messages a second keep a disk, or a network card, as busy as planned."""
        costs = self.costs
        how = f"{percent(costs['busy'])} of {name} {bytes_of(costs[name])}/s ÷ {bytes_of(size)}"
        return Limit(costs["busy"] * costs[name] / size, how)


_MORE = "more of them"
