"""OpenTelemetry: spans and metrics, by whatever providers the process has set up.

Rules kept here:
- Only the API of OpenTelemetry is used. Which SDK there is, what it samples and where it sends to is the program's
  matter; without an SDK nothing is recorded, and trace contexts are handed on.
- Metrics are those of `metrics.py`, as observable instruments: they are read when the SDK collects them. So the
  durations of tries are counts by upper bound (`le`), as Prometheus has them: OpenTelemetry has no histogram that is
  read, and to record each value costs more than to handle a message.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation, get_meter_provider
from opentelemetry.trace import TracerProvider, get_tracer_provider

from faregate.core.handler import Call
from faregate.core.observer import Observer, Publish, Step
from faregate.errors import ConfigurationError
from faregate.message import Envelope
from faregate.node.subscription import Subscription
from faregate.observe.measuring import Measuring, Tries
from faregate.observe.metrics import METRICS, BusMetrics, Metric, buckets
from faregate.observe.tracing import Tracing
from faregate.version import __version__

if TYPE_CHECKING:
    from faregate.bus.bus import Bus

Callback = Callable[[CallbackOptions], Iterable[Observation]]


class OpenTelemetry(Observer):
    """Spans and metrics of the buses (or the Spark run) that it observes. The providers are those that the process has
    set, unless they are given; they are asked for when this is made."""

    def __init__(
        self, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        tracers = get_tracer_provider() if tracer_provider is None else tracer_provider
        meters = get_meter_provider() if meter_provider is None else meter_provider
        _check_provider("tracer_provider", tracers, "get_tracer")
        _check_provider("meter_provider", meters, "get_meter")
        self._tracing = Tracing(tracers.get_tracer("faregate", __version__))
        self._measuring = Measuring(self._tracing.note_failed_try)
        self._watched: list[BusMetrics] = []
        self._make_instruments(meters.get_meter("faregate", __version__))

    # --- for the core ------------------------------------------------------------------------------------------

    def around_handling(self, subscription: Subscription, step: Step) -> Step:
        return self._tracing.around_handling(subscription, step)

    def around_try(self, subscription: Subscription, call: Call) -> Call:
        return self._measuring.around_try(subscription, call)

    def around_publish(self, publish: Publish, *, outbox: bool = False) -> Publish:
        return self._tracing.around_publish(publish, outbox=outbox)

    def around_transport(self, publish: Publish) -> Publish:
        return self._measuring.around_transport(publish)

    def stamp(self, envelope: Envelope) -> None:
        self._tracing.stamp(envelope)

    def watch(self, bus: "Bus") -> None:
        self._watched = [*self._watched, BusMetrics(bus, self._measuring)]

    def unwatch(self, bus: "Bus") -> None:
        self._watched = [each for each in self._watched if each.bus is not bus]

    # --- metrics -----------------------------------------------------------------------------------------------

    def _make_instruments(self, meter: Meter) -> None:
        for name, metric in METRICS.items():
            full = f"faregate.{name}"
            if metric.kind == "histogram":
                for part, read in (("bucket", self._buckets), ("sum", self._seconds), ("count", self._tries)):
                    meter.create_observable_counter(f"{full}.{part}", [read], metric.unit, metric.help)
            else:
                make = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
                make(full, [self._reader(name, metric)], metric.unit, metric.help)

    def _reader(self, name: str, metric: Metric) -> Callback:
        def read(options: CallbackOptions) -> Iterable[Observation]:
            for watched in self._watched:
                if name == "waiting_messages":
                    watched.refresh_from_thread()
                for labels, value in watched.read(name):
                    yield Observation(value, dict(zip(metric.labels, labels, strict=True)))

        return read

    def _buckets(self, options: CallbackOptions) -> Iterable[Observation]:
        for tries in self._measuring.tries:
            for bound, count in buckets(tries):
                yield Observation(count, {**_labels(tries), "le": bound})

    def _seconds(self, options: CallbackOptions) -> Iterable[Observation]:
        return (Observation(tries.seconds, _labels(tries)) for tries in self._measuring.tries)

    def _tries(self, options: CallbackOptions) -> Iterable[Observation]:
        return (Observation(sum(tries.buckets), _labels(tries)) for tries in self._measuring.tries)


def _check_provider(name: str, given: object, method: str) -> None:
    """By what it can do: not all providers are of the API's own class."""
    if isinstance(given, type) or not callable(getattr(given, method, None)):
        raise ConfigurationError(f"{name} takes a provider of OpenTelemetry, which has {method}(); got {given!r}")


def _labels(tries: Tries) -> dict[str, str]:
    return dict(zip(METRICS["try_seconds"].labels, tries.place, strict=True))
