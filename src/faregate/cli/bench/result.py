"""What a run found, as plain figures: what `--json` prints, and what the reports are made of. Times are seconds."""

from typing import Any

from faregate.cli.bench.load import Load
from faregate.cli.bench.meter import Durations, merged, percentile, windows
from faregate.cli.bench.subject import Subject

CURVE = (*range(100), 99.5, 99.9, 100)
"""The percents of which a report draws how long messages took."""


def result_of(load: Load, subject: Subject) -> dict[str, Any]:
    plan, meter, start = load.plan, load.meter, load.start
    published = meter.published.since(start)
    roots = merged(
        durations.since(start) for (_, type), durations in meter.handled.items() if type == subject.message_type.wire
    )
    seconds = max(load.end - start, 1e-9)
    # What was handled behind the end of the sending counts for latencies; a rate is about the time of sending.
    in_time = sum(1 for at in roots.at if at <= load.end)
    width, over_time = windows(start, load.end, {"published": published, "handled": roots})
    return {
        "message": subject.message_type.wire,
        "where": subject.where,
        "stores": sorted(subject.bus.stores),
        "producers": plan.producers,
        "burst": plan.burst,
        "rate": plan.rate,
        "warm_up": plan.warm_up,
        "seconds": seconds,
        "published": len(published.at),
        "published_per_second": len(published.at) / seconds,
        "handled_per_second": in_time / seconds,
        "publish": published.summary(),
        "end_to_end": roots.summary(),
        "late": meter.late.since(start).summary() if plan.rate is not None else None,
        "outcomes": dict(meter.outcomes),
        "errors": dict(meter.errors),
        "alarms": dict(subject.bus.alarms),
        "waiting": load.waiting,
        "subscriptions": [
            {"node": node, "type": type, "per_second": _in_time(each, load) / seconds, **each.summary()}
            for (node, type), each in ((name, found.since(start)) for name, found in sorted(meter.handled.items()))
        ],
        "window": width,
        "over_time": over_time,
        "curves": {"publish": _curve(published), "end_to_end": _curve(roots)},
    }


def is_clean(result: dict[str, Any]) -> bool:
    return not (result["errors"] or result["waiting"] or result["outcomes"].get("dead"))


def _in_time(durations: Durations, load: Load) -> int:
    return sum(1 for at in durations.at if at <= load.end)


def _curve(durations: Durations) -> list[tuple[float, float]]:
    ordered = sorted(durations.took)
    return [(percent, percentile(ordered, percent / 100) or 0.0) for percent in CURVE] if ordered else []
