"""One trace over a bus, a run on Spark and a bus again; who observes a run is named, and imported by each worker."""

import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.columns import to_batch, to_envelopes
from faregate.ports.topology import Reading
from faregate.spark.runs import stateless
from faregate.spark.runs.rows import Places
from faregate.spark.runs.spec import RunSpec, load_observers, provide
from tests.spark import observed, run_shop
from tests.spark.run_rig import Shop, the_shop
from tests.spark.test_run_plain import asked, node

__all__ = ["the_shop"]


def spans_of(trace_id: int) -> list[dict[str, Any]]:
    path = observed.file_of(trace_id)
    found = []
    for line in path.read_text().splitlines():
        process, _, text = line.partition(" ")
        found.append({**json.loads(text), "process": int(process)})
    path.unlink()
    return found


def one(spans: list[dict[str, Any]], name: str) -> dict[str, Any]:
    [span] = [span for span in spans if span["name"] == name]
    return span


@pytest.mark.services
def test_one_trace_goes_over_a_bus_a_spark_run_and_a_bus(the_shop: Shop) -> None:
    """publish (bus) -> handle (a worker of Spark) -> dispatch (its driver) -> handle (bus)."""

    async def with_bus(names: list[str], publish: bool) -> None:
        nodes = [getattr(run_shop, name) for name in names]
        async with fg.Bus(the_shop.url, nodes=nodes, store=the_shop.store, observe=observed.telemetry) as bus:
            if publish:
                with observed.tracers.get_tracer("test").start_as_current_span("request") as span:
                    trace_ids.append(span.get_span_context().trace_id)
                    order = run_shop.OrderPlaced(order_id=the_shop.key(0), number=0, total=10)
                    await bus.publish(order, node="shop")
            else:
                await bus.idle(30)

    trace_ids: list[int] = []
    asyncio.run(with_bus(["shop", "payments"], publish=True))
    the_shop.run_to_end("billing", observe="tests.spark.observed:telemetry")
    asyncio.run(with_bus(["payments"], publish=False))
    the_shop.check(1)
    the_shop.check(1, "charges")
    spans = spans_of(trace_ids[0])
    publish, bill = one(spans, "publish shop.OrderPlaced"), one(spans, "handle shop.OrderPlaced")
    dispatch, charge = one(spans, "dispatch payments"), one(spans, "handle payments")
    assert publish["parent_id"] == one(spans, "request")["context"]["span_id"]
    assert bill["parent_id"] == publish["context"]["span_id"]
    assert bill["process"] != os.getpid() == dispatch["process"]
    assert dispatch["parent_id"] == charge["parent_id"] == bill["context"]["span_id"]
    assert [link["context"]["span_id"] for link in dispatch["links"]] == [bill["context"]["span_id"]]


def test_a_node_without_a_store_is_observed_and_does_without_the_short_way() -> None:
    observer = "tests.spark.observed:telemetry"
    begins = {"answers.Asked.asking": Reading()}
    spec = RunSpec("observed", "answers", "", None, None, "json", 100_000, begins, observer)
    provide(spec, node("async"))
    trace_id = 0x4BF92F3577B34DA6A3CE929D0E0E4736
    cause = asked(8, traceparent=f"00-{trace_id:032x}-00f067aa0ba902b7-01")
    batch = to_batch([cause], [0], range(1), 7_000_000)
    observed.file_of(trace_id).unlink(missing_ok=True)
    with ThreadPoolExecutor(2) as pool, closing(asyncio.new_event_loop()) as loop:
        task = stateless.Task(spec, pool)
        [piece] = stateless.runner(loop)(task.handle_batch(0, Places(spec).taken(0, batch)))
    span = one(spans_of(trace_id), "handle asking.Asked")
    assert span["parent_id"] == "0x00f067aa0ba902b7"
    [sent] = to_envelopes(piece)
    assert sent.traceparent == f"00-{trace_id:032x}-{int(span['context']['span_id'], 16):016x}-01"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("tests.spark.observed", "does not name who observes the run"),
        ("tests.spark.observed:missing", "observe= names an observer of fg.observe"),
        ("tests.spark.nowhere:x", "there is no module 'tests.spark.nowhere'"),
        ("tests.spark.observed:nothing", "observe= takes"),
        (observed.telemetry, "observe= of a Spark run is a name"),
    ],
    ids=["no attribute", "missing", "no module", "no observer", "an object"],
)
def test_what_does_not_name_an_observer_is_refused(given: Any, text: str) -> None:
    with pytest.raises(fg.ConfigurationError, match=text):
        load_observers(given, str(Path.cwd()))
