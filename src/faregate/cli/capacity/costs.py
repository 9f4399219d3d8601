"""What one message costs: the names, what each is of, and the file that has their values.

Rules kept here:
- Every figure that the calculation uses has a name in `KNOWN`, and every name is in every file: nothing is a default.
- A file says of each figure where it comes from. An assumption is never shown as a measurement.
- A file of costs names no machine: the number of its cores, and whether it had other work.
"""

import math
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Literal

import msgspec

from faregate.errors import ConfigurationError

Origin = Literal["measured", "reported", "assumed", "given"]
"""`measured` by `capacity measure`, by the command of the file; `reported`: computed from a rate that an earlier run
found, which the note names and which was not run again; `given` on the command line."""

KNOWN = {
    # Processor time of one message, in the process that publishes or handles it.
    "publish": ("µs", "publish to a journal, 1,000 together"),
    "handle_none": ("µs", "take from a journal and handle, without a store"),
    "handle_sqlite": ("µs", "the same with a ledger row and one insert in SQLite"),
    "handle_postgresql": ("µs", "the same in PostgreSQL, without the server's part"),
    "send_sqlite": ("µs", "send one message from a handler: outbox, then the journal"),
    "send_postgresql": ("µs", "the same from PostgreSQL, without the server's part"),
    "amqp_publish": ("µs", "publish to RabbitMQ, 1,000 together, confirmed"),
    "amqp_handle": ("µs", "take from a queue of RabbitMQ and handle, without a store"),
    "stream_read": ("µs", "read from a stream of RabbitMQ and decode"),
    "spark_none": ("µs", "handle on Spark without a store and send one: Java and Python"),
    "spark_postgresql": ("µs", "handle with a ledger row and one insert in PostgreSQL"),
    "spark_send": ("µs", "send one message from a handler on Spark, all processes"),
    "spark_driver": ("µs", "the part of that in the driver's Python: it alone sends"),
    # Processor time of the servers.
    "database": ("µs", "PostgreSQL: ledger row, one insert, its share of a commit"),
    "database_send": ("µs", "PostgreSQL: an outbox row, written, read and removed"),
    "queue_in": ("µs", "RabbitMQ: into a quorum queue of one replica"),
    "queue_out": ("µs", "RabbitMQ: out of the queue, and acknowledged"),
    "stream_in": ("µs", "RabbitMQ: through the exchange into a stream"),
    "stream_out": ("µs", "RabbitMQ: out of a stream, to one reader"),
    # By the clock.
    "key_sqlite": ("ms", "from one message of a key to the next, SQLite"),
    "key_postgresql": ("ms", "from one message of a key to the next, PostgreSQL"),
    # On disks and on the wire.
    "journal_bytes": ("B", "a message in a sealed journal, without its body"),
    "stream_bytes": ("B", "a message in a stream, or on the wire, without its body"),
    "ledger_sqlite": ("B", "a ledger row with its index, SQLite"),
    "ledger_postgresql": ("B", "a ledger row with its index, PostgreSQL"),
    "wal": ("B", "PostgreSQL's write-ahead log, for a handled message"),
    "wal_send": ("B", "PostgreSQL's write-ahead log, for a sent message"),
    # Of a commit.
    "messages_per_commit": ("", "messages that share a commit under load"),
    "commits": ("/s", "commits that one PostgreSQL syncs"),
    # What one leader takes, whatever else its broker does.
    "queue_rate": ("/s", "messages through one quorum queue, at most"),
    "stream_rate": ("/s", "messages into one stream, at most"),
    # What your machines are, and how much of them you want to use.
    "busy": ("", "the share of a core, disk or network that is planned for"),
    "database_cores": ("", "cores of one PostgreSQL"),
    "database_disk": ("B", "the largest database that you want to restore"),
    "broker_cores": ("", "cores of one RabbitMQ node"),
    "brokers": ("", "nodes of one RabbitMQ cluster, at most"),
    "replicas": ("", "replicas of a quorum queue or stream"),
    "disk_write": ("B/s", "what a disk writes in sequence"),
    "network": ("B/s", "what a network card sends"),
}
"""The unit of each figure, and what it is."""


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    value: float
    origin: Origin
    note: str = ""
    """Where it comes from, if that needs words."""


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    date: str
    machine: str
    """Its class alone, such as "2 cores, busy with other work"."""
    command: str
    figures: dict[str, Figure]
    format: Annotated[str, msgspec.Meta(pattern="^faregate-costs-1$")] = "faregate-costs-1"

    def __getitem__(self, name: str) -> float:
        return self.figures[name].value


def load_costs(path: Path | None) -> Costs:
    """From a file, or those that come with Faregate. Raises `ConfigurationError`, which says what is wrong in it."""
    try:
        text = (files(__package__) / "costs.json").read_bytes() if path is None else path.read_bytes()
        costs = msgspec.json.decode(text, type=Costs)
    except OSError as exc:
        raise ConfigurationError(f"the costs in {path} cannot be read: {exc.strerror}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigurationError(f"{path} is no file of costs: {exc}. `faregate capacity measure` writes one") from exc
    check(costs, str(path or "costs.json"))
    return costs


def check(costs: Costs, place: str) -> None:
    if missing := [name for name in KNOWN if name not in costs.figures]:
        raise ConfigurationError(f"{place} has no {', '.join(missing)}; `faregate capacity measure` writes them all")
    if unknown := [name for name in costs.figures if name not in KNOWN]:
        raise ConfigurationError(f"{place} has figures that nobody knows: {', '.join(unknown)}")
    for name, figure in costs.figures.items():
        if not 0 < figure.value < math.inf:
            raise ConfigurationError(f"{place}: {name} is {figure.value:g}, and must be more than 0")
    if costs["busy"] > 1:
        raise ConfigurationError(f"{place}: busy is {costs['busy']:g}, and is a share: at most 1")
    if not 1 <= costs["replicas"] <= costs["brokers"]:
        raise ConfigurationError(
            f"{place}: replicas is {costs['replicas']:g}, and must be 1 or more, and at most brokers, which is "
            f"{costs['brokers']:g}: each lies on a node of its own"
        )


def with_given(costs: Costs, given: list[str]) -> Costs:
    """Figures of the command line, NAME=VALUE, in place of those in the file."""
    figures = dict(costs.figures)
    for text in given:
        name, _, value = text.partition("=")
        if name not in KNOWN:
            raise ConfigurationError(f"--set {text}: there is no figure {name!r}. There are: {', '.join(KNOWN)}")
        try:
            figures[name] = Figure(float(value), "given")
        except ValueError:
            raise ConfigurationError(f"--set {text}: {value!r} is no number; write {name}=12.5") from None
    found = msgspec.structs.replace(costs, figures=figures)
    check(found, "--set")
    return found


def check_place(path: Path) -> None:
    """Before anything is measured, which takes minutes: whether its costs can be written there."""
    try:
        with path.open("ab") if path.exists() else TemporaryFile(dir=path.parent):
            pass
    except OSError as exc:
        raise ConfigurationError(f"the costs cannot be written to {path}: {exc.strerror}") from exc


def write_costs(costs: Costs, path: Path) -> None:
    check(costs, str(path))
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(costs), indent=2) + b"\n")
    except OSError as exc:
        raise ConfigurationError(f"the costs cannot be written to {path}: {exc.strerror}") from exc
