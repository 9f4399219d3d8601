"""`faregate spark run` and `faregate spark handover`: a node on Spark, and which engine may have it."""

import signal
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from faregate.bus.bus import MAX_MESSAGE_BYTES, RETAIN_LEDGER
from faregate.cli.load import BusName, load_bus
from faregate.cli.output import answer, errors, print_json
from faregate.cli.spark.session import Master, session
from faregate.errors import ConfigurationError
from faregate.ports.queue import Logged

if TYPE_CHECKING:
    from faregate.spark.runs.progress import RunProgress

AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON, a line for each batch.")]
_LOOK_SECONDS = 1.0


def run(
    target: Annotated[str, typer.Argument(help="The node, as module:attribute.", metavar="MODULE:NODE")],
    log: Annotated[
        str,
        typer.Option("--log", "--journal", help="The journal's folder, or the URL of another log.", metavar="LOG"),
    ],
    checkpoint: Annotated[str, typer.Option(help="Where Spark keeps how far it has come.")],
    store: Annotated[
        str | None, typer.Option(help="The node's store, sqlite:PATH or postgresql://…; none: no effects, no store.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="The bus' token store, where that is another database than the node's store.")
    ] = None,
    trigger: Annotated[str, typer.Option(help="available-now, or how often to look: 5s, 500ms.")] = "available-now",
    max_messages: Annotated[int, typer.Option(min=1, help="At most so many messages a batch.")] = 1_000_000,
    handover: Annotated[
        bool, typer.Option("--handover", help="Take subscriptions over from their queues; the bus must be stopped.")
    ] = False,
    start: Annotated[
        int | None, typer.Option(min=0, help="The offset at which a handler begins that has not run on Spark yet.")
    ] = None,
    retain_ledger: Annotated[
        float, typer.Option(help="For how many seconds the ledger remembers messages; as on the bus.")
    ] = RETAIN_LEDGER,
    codec: Annotated[str, typer.Option(help="How messages are sent: json, msgpack, or a content type.")] = "json",
    max_message_bytes: Annotated[
        int, typer.Option(min=1, help="The longest body that is read or sent; as on the bus.")
    ] = MAX_MESSAGE_BYTES,
    observe: Annotated[
        str | None,
        typer.Option(help="Who observes the run: an observer of fg.observe, by name.", metavar="MODULE:ATTRIBUTE"),
    ] = None,
    master: Master = "local[2]",
    as_json: AsJson = False,
) -> None:
    """Run a node's handlers on Spark, from the log of a bus. Ctrl-C finishes the batch at hand and ends."""
    with session(master, "run", keep_log=True) as spark:
        from faregate.spark.runs.run import run as begin

        total: dict[str, int] = {}
        asked = threading.Event()
        previous = {number: signal.signal(number, _stopper(asked)) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            handle = begin(
                target,
                spark,
                source=log,
                store=store,
                tokens=tokens,
                checkpoint=checkpoint,
                trigger=trigger,
                max_messages_per_trigger=max_messages,
                handover=handover,
                start=start,
                retain_ledger=retain_ledger,
                codec=codec,
                max_message_bytes=max_message_bytes,
                observe=observe,
                on_progress=lambda progress: _show(progress, total, as_json),
            )
            while not asked.is_set() and not handle.await_termination(_LOOK_SECONDS):
                pass
            handle.stop()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
    said = f"{target}: {_counts(total) or 'nothing to do'}"
    answer({"node": target, "outcomes": total}, said, as_json=as_json)


def _stopper(asked: threading.Event) -> Any:
    def stop(number: int, frame: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        errors.print("finishing the batch at hand; press Ctrl-C again to stop at once")

    return stop


def _counts(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())


def _show(progress: "RunProgress", total: dict[str, int], as_json: bool) -> None:
    for outcome, count in progress.outcomes.items():
        total[outcome] = total.get(outcome, 0) + count
    if as_json:
        print_json(progress._asdict())
    elif progress.outcomes or progress.sent:
        name = "parked" if progress.batch is None else f"batch {progress.batch}"
        said = _counts(progress.outcomes)
        errors.print(f"{name}: {said}; {progress.sent} sent, up to {progress.low_water}, {progress.seconds:.1f} s")


def handover(
    target: BusName,
    node: Annotated[str, typer.Argument(help="The node to hand over.", metavar="NODE")],
    to: Annotated[Literal["log", "queue"], typer.Option("--to", help="log: Spark takes it. queue: the bus does.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Let Spark (log) or the bus (queue) consume a node. The bus must be stopped meanwhile."""
    bus = load_bus(target)
    found = bus.nodes.get(node)
    if found is None:
        raise ConfigurationError(f"there is no node {node!r} on this bus; its nodes are: {', '.join(bus.nodes)}")
    place = bus.transport.log_place if isinstance(bus.transport, Logged) else None
    if place is None:
        raise ConfigurationError(
            f"{bus.url} has no log: a journal has one, and a RabbitMQ with a stream beside its queues, ?stream=NAME"
        )
    from faregate.spark.runs.handover import hand_over

    done = hand_over(found, place, bus.store_of(node), to)
    lines = [
        f"{each.queue}: {'now' if each.changed else 'already'} read from the {each.view}, "
        f"offset {each.offset} on (epoch {each.epoch})"
        for each in done
    ]
    told = {"node": node, "subscriptions": [each._asdict() for each in done]}
    answer(told, "\n".join(lines), as_json=as_json)
