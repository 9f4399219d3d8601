"""Telemetry that fails decides nothing: what is published is out, what is handled stays so, a bus opens and closes."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import Sampler
from prometheus_client import CollectorRegistry

import faregate as fg
from faregate.core.observer import Mishaps, Observer
from tests.observe.rig import LONG, OrderPlaced, Telemetry, three_nodes


class FailsAtStart(SpanProcessor):
    def __init__(self, error: Callable[[], BaseException]) -> None:
        self.error = error

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        raise self.error()


class FailsAtEnd(FailsAtStart):
    def on_start(self, span: Any, parent_context: Any = None) -> None:
        pass

    def on_end(self, span: ReadableSpan) -> None:
        raise self.error()


class FailsToSample(Sampler):
    def should_sample(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("no sample")

    def get_description(self) -> str:
        return "fails"


class UnknownOrder(fg.Permanent):
    reason = "unknown-order"


class Ended(BaseException):
    """No Exception, and no end of the process either."""


def tracers(processor: SpanProcessor | None = None, sampler: Sampler | None = None) -> TracerProvider:
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    if processor is not None:
        provider.add_span_processor(processor)
    return provider


PROVIDERS: dict[str, Callable[[], TracerProvider]] = {
    "start": lambda: tracers(FailsAtStart(RuntimeError)),
    "end": lambda: tracers(FailsAtEnd(RuntimeError)),
    "cancelled at start": lambda: tracers(FailsAtStart(asyncio.CancelledError)),
    "cancelled at end": lambda: tracers(FailsAtEnd(asyncio.CancelledError)),
    "no exception": lambda: tracers(FailsAtEnd(Ended)),
    "a group": lambda: tracers(FailsAtEnd(lambda: BaseExceptionGroup("several", [Ended()]))),
    "sampler": lambda: tracers(sampler=FailsToSample()),
}


@pytest.mark.parametrize("fails", PROVIDERS)
async def test_a_publish_ends_as_it_ends_without_telemetry(fails: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "faregate.bus")
    shop, billing = fg.Node("shop"), fg.Node("billing")
    got: list[str] = []

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> None:
        got.append(order.order_id)

    observe = fg.observe.OpenTelemetry(PROVIDERS[fails](), MeterProvider())
    async with fg.Bus("memory:", nodes=[shop, billing], observe=observe) as bus:
        for number in range(10):
            await bus.publish(OrderPlaced(order_id=str(number)))
        await bus.idle(LONG)
        assert got == [str(number) for number in range(10)]
        assert bus.breaker is not None and bus.breaker.state == "closed"
        assert bus.outcomes()["handled"] == 10 and not bus.alarms and not await bus.dead_letters()
    told = [record for record in caplog.records if "telemetry failed" in record.message]
    loud = [record for record in told if record.levelno > logging.DEBUG]
    places = {record.message for record in told}
    assert places and len(told) == 20
    assert len(loud) == len(places), "one warning for each place"


@pytest.mark.parametrize("fails", PROVIDERS)
async def test_every_hop_of_a_chain_is_handled_once(fails: str, tmp_path: Path) -> None:
    observe = fg.observe.OpenTelemetry(PROVIDERS[fails](), MeterProvider())
    async with three_nodes(tmp_path, observe) as bus:
        await bus.publish_many([OrderPlaced(order_id=str(number)) for number in range(30)])
        await bus.idle(LONG)
        assert {name: count for name, count in bus.outcomes().items() if count} == {"handled": 90}
        assert not bus.alarms


@pytest.mark.parametrize("fails", PROVIDERS)
async def test_what_fails_by_itself_fails_with_its_own_error(fails: str) -> None:
    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> None:
        raise UnknownOrder("no such order")

    observe = fg.observe.OpenTelemetry(PROVIDERS[fails](), MeterProvider())
    async with fg.Bus("memory:", nodes=[shop, billing], observe=observe, max_message_bytes=200) as bus:
        with pytest.raises(fg.MessageTooLarge):
            await bus.publish(OrderPlaced(order_id="x" * 1000))
        await bus.publish(OrderPlaced(order_id="17"))
        await bus.idle(LONG)
        [letter] = await bus.dead_letters()
        assert letter.reason == "unknown-order" and "UnknownOrder: no such order" in letter.error


async def test_an_error_that_cannot_be_written_down_is_still_the_error_of_its_message() -> None:
    class Unreadable(UnknownOrder):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.on(OrderPlaced, source="shop", retry=fg.Retry(3, delay=0))
    async def bill(order: OrderPlaced) -> None:
        raise Unreadable

    async with fg.Bus("memory:", nodes=[shop, billing], observe=Telemetry().observer) as bus:
        await bus.publish(OrderPlaced(order_id="17"))
        await bus.idle(LONG)
        [letter] = await bus.dead_letters()
        assert letter.reason == "unknown-order"


async def test_a_handler_without_a_span_hands_on_the_context_of_its_cause(tmp_path: Path) -> None:
    telemetry = Telemetry()
    broken = fg.observe.OpenTelemetry(PROVIDERS["start"](), MeterProvider())
    async with three_nodes(tmp_path, [telemetry.observer, broken]) as bus:  # the broken one is the inner one
        await bus.publish(OrderPlaced(order_id="17"))
        await bus.idle(LONG)
    assert len({span.context.trace_id for span in telemetry.spans if span.context is not None}) == 1


def test_what_ends_the_process_does() -> None:
    told = Mishaps()
    for error in (KeyboardInterrupt(), SystemExit(3), BaseExceptionGroup("", [ValueError(), KeyboardInterrupt()])):
        with pytest.raises(type(error)):
            told.tell("here", error)


def test_a_log_that_fails_as_well_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the collector of log records is down, too")

    monkeypatch.setattr(logging.getLogger("faregate.bus"), "log", fail)
    Mishaps().tell("here", ValueError())


# --- opening and closing ---------------------------------------------------------------------------------------


class Refuses(CollectorRegistry):
    def register(self, collector: Any) -> None:
        raise ValueError("refused")


class Keeps(CollectorRegistry):
    def unregister(self, collector: Any) -> None:
        raise RuntimeError("kept")


class Cancels(Observer):
    def watch(self, bus: Any) -> None:
        raise asyncio.CancelledError

    def unwatch(self, bus: Any) -> None:
        raise asyncio.CancelledError


class Notes(Observer):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def watch(self, bus: Any) -> None:
        self.seen.append("watch")

    def unwatch(self, bus: Any) -> None:
        self.seen.append("unwatch")


async def nothing(order: OrderPlaced) -> None:
    pass


@pytest.mark.parametrize(
    "make",
    [lambda: fg.observe.Prometheus(Refuses()), lambda: fg.observe.Prometheus(Keeps()), Cancels],
    ids=["refuses", "keeps", "cancels"],
)
async def test_an_observer_that_cannot_watch_keeps_a_bus_from_nothing(
    make: Callable[[], Observer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notes = Notes()

    def bus(observe: Any = None) -> fg.Bus:
        shop, billing = fg.Node("shop"), fg.Node("billing")
        billing.on(OrderPlaced, source="shop")(nothing)
        return fg.Bus(f"journal:{tmp_path / 'journal'}", nodes=[shop, billing], observe=observe)

    async with bus([make(), notes]) as first:
        await first.publish(OrderPlaced(order_id="17"))
        await first.idle(LONG)
    assert notes.seen == ["watch", "unwatch"], "the others are told all the same"
    assert "the bus. Messages go on without it" in caplog.text
    async with bus():  # the journal is free again
        pass


async def test_a_registry_that_was_emptied_is_nothing_to_tell(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    observer = fg.observe.Prometheus(registry)
    async with fg.Bus("memory:", nodes=[fg.Node("shop")], observe=observer):
        registry.unregister(observer)
    assert "telemetry failed" not in caplog.text


async def test_a_registry_that_refused_is_asked_again_for_the_next_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    observer = fg.observe.Prometheus(registry)
    with monkeypatch.context() as patched:
        patched.setattr(registry, "register", Refuses().register)
        async with fg.Bus("memory:", nodes=[fg.Node("shop")], observe=observer):
            pass
    async with fg.Bus("memory:", nodes=[fg.Node("shop")], observe=observer):
        assert b"faregate_alarms_total" in await observer.page()


def test_the_same_observer_twice_is_refused() -> None:
    observer = fg.observe.Prometheus(CollectorRegistry())
    with pytest.raises(fg.ConfigurationError, match="the same observer twice"):
        fg.Bus("memory:", nodes=[fg.Node("shop")], observe=[observer, observer])


@pytest.mark.parametrize("given", [5, "otel", TracerProvider, object()], ids=["number", "text", "class", "object"])
def test_what_provides_nothing_is_refused_in_a_sentence(given: Any) -> None:
    with pytest.raises(fg.ConfigurationError, match="tracer_provider takes a provider of OpenTelemetry"):
        fg.observe.OpenTelemetry(tracer_provider=given)
    with pytest.raises(fg.ConfigurationError, match="meter_provider takes a provider of OpenTelemetry"):
        fg.observe.OpenTelemetry(meter_provider=given)
    with pytest.raises(fg.ConfigurationError, match="registry takes a CollectorRegistry"):
        fg.observe.Prometheus(given)
