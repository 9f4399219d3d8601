"""Metrics for Prometheus. They are read at each scrape.

Rules kept here:
- All names begin with `faregate_`. They are those of `metrics.py`, counters with `_total`.
- What a registry holds of a process or of the user's own is on the same page: the default registry is.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry, Metric, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from faregate.errors import ConfigurationError
from faregate.observe.measuring import Measuring
from faregate.observe.metrics import METRICS, BusMetrics, buckets

if TYPE_CHECKING:
    from faregate.bus.bus import Bus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Prometheus(Measuring, Collector):
    """Counts the handlers' durations, failures and retries of the buses that it observes, and what they publish, and
    shows them, with all that a bus knows anyway, in `registry` (the default one of prometheus_client unless given)."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__()
        self._registry = REGISTRY if registry is None else registry
        if not isinstance(self._registry, CollectorRegistry):
            raise ConfigurationError(f"registry takes a CollectorRegistry of prometheus_client; got {registry!r}")
        self._watched: list[BusMetrics] = []

    def watch(self, bus: "Bus", *, measured: bool = True) -> None:
        if not self._watched:  # a registry that refuses is asked again for the next bus
            self._registry.register(self)
        self._watched.append(BusMetrics(bus, self if measured else None))

    def unwatch(self, bus: "Bus") -> None:
        watched, self._watched = self._watched, [each for each in self._watched if each.bus is not bus]
        if watched and not self._watched:
            with suppress(KeyError):  # somebody has emptied the registry
                self._registry.unregister(self)

    def describe(self) -> list[Metric]:
        """Nothing: who registers it must not be asked for values yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Called by the registry, in whichever thread a page is made."""
        for watched in self._watched:
            watched.refresh_from_thread()
        for name, metric in METRICS.items():
            full = f"faregate_{name}"
            if metric.kind == "histogram":
                histogram = HistogramMetricFamily(full, metric.help, labels=metric.labels)
                for tries in (each for watched in self._watched for each in watched.tries):
                    histogram.add_metric(tries.place, buckets(tries), tries.seconds)
                yield histogram
            else:
                family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                samples = family(full, metric.help, labels=metric.labels)
                for labels, value in (each for watched in self._watched for each in watched.read(name)):
                    samples.add_metric(labels, value)
                yield samples

    async def page(self) -> bytes:
        """What Prometheus reads, made on the event loop."""
        for watched in self._watched:
            await watched.refresh()
        return generate_latest(self._registry)
