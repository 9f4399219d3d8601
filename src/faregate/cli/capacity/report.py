"""A plan for people and for programs."""

import math
from typing import Any

from rich.text import Text

from faregate.cli.capacity.costs import KNOWN, Costs
from faregate.cli.capacity.load import Load
from faregate.cli.capacity.plan import Amount, Plan
from faregate.cli.capacity.words import bits_of, bytes_of, figure
from faregate.cli.output import say
from faregate.cli.table import Column, hanging, numbers, room, show_table
from faregate.units import counted


def as_json(plan: Plan, costs: Costs) -> dict[str, Any]:
    load = plan.load
    return {
        "load": {name: getattr(load, name) for name in Load.__dataclass_fields__},
        "costs": {"date": costs.date, "machine": costs.machine}
        | {name: {"value": each.value, "origin": each.origin} for name, each in costs.figures.items()},
        "parts": [
            {
                "part": part.name,
                "needed": part.needed(load.rate, plan.shards),
                "one_takes": part.limit.rate,
                "full_at": part.full_at,
                "stops_at": _finite(part.stops_at),
                "how": part.limit.how,
                "then": part.then,
                "limits": [{"rate": _finite(limit.rate), "how": limit.how} for limit in part.limits],
            }
            for part in plan.parts
        ],
        "amounts": [each._asdict() for each in plan.amounts],
        "shards": plan.shards,
        "first_full": plan.first_full.name,
        "first_stop": plan.first_stop.name if math.isfinite(plan.first_stop.stops_at) else None,
        "key_too_hot": plan.too_hot,
    }


def _finite(rate: float) -> float | None:
    return rate if math.isfinite(rate) else None


def show(plan: Plan, costs: Costs) -> None:
    _say(plan.load.told(), "bold")
    _say(f"Costs of {costs.date}, from {costs.machine}", "dim")
    say("")
    parts = [
        (part.name, f"{part.needed(plan.load.rate, plan.shards):,}", f"{figure(part.limit.rate)}/s", part.limit.how)
        for part in plan.parts
    ]
    show_table([Column("PART"), *numbers("NEEDED", "ONE TAKES"), Column("BECAUSE")], parts)
    say("")
    show_table([Column("BYTES"), *numbers("AMOUNT"), Column("BECAUSE")], [_amount(each) for each in plan.amounts])
    say("")
    stops = sorted((part for part in plan.parts if part.most is not None), key=lambda part: part.stops_at)
    rows = [(part.name, f"{part.most:,}", f"{figure(part.stops_at)}/s", part.then) for part in stops]
    show_table([Column("WHERE IT STOPS"), *numbers("MOST", "AT"), Column("THEN")], rows)
    say("")
    for line in _conclusions(plan):
        _say(line)


def _amount(each: Amount) -> tuple[str, str, str]:
    shown = f"{bytes_of(each.bytes)}/s" if each.is_rate else bytes_of(each.bytes)
    if "network" in each.name:
        shown = bits_of(each.bytes)
    return each.name, shown, each.how


def _conclusions(plan: Plan) -> list[str]:
    full, stop = plan.first_full, plan.first_stop
    found = [f"With one of each, the first to be full: {full.name}, at {figure(full.full_at)} messages a second."]
    if math.isfinite(stop.stops_at):
        found.append(
            f"The first where more of the same does not help: {stop.name}, at {figure(stop.stops_at)} messages a "
            f"second."
        )
    if plan.shards == 1:
        found.append("One shard is enough: nothing has to be divided by key.")
    else:
        part = max((each for each in plan.parts if each.is_sharded), key=lambda each: -each.stops_at)
        found.append(
            f"So this load is {counted(plan.shards, 'shard')} of {figure(plan.load.rate / plan.shards)} messages a "
            f"second, that share nothing, because of: {part.name}."
        )
    if plan.too_hot:
        found.append("One key has more messages than can be handled one after another: no number of machines helps.")
    return found


def show_costs(costs: Costs) -> None:
    _say(f"Costs of {costs.date}, from {costs.machine}", "bold")
    _say(costs.command, "dim")
    say("")
    rows = [(name, _value(costs[name], unit), costs.figures[name].origin, what) for name, (unit, what) in KNOWN.items()]
    show_table([Column("FIGURE", is_whole=True), *numbers("VALUE"), Column("FROM"), Column("WHAT")], rows)
    for name, each in costs.figures.items():
        if each.note:
            _say(f"{name}: {each.note}", "dim")


def _value(value: float, unit: str) -> str:
    shown = bytes_of(value) + unit.removeprefix("B") if unit.startswith("B") else f"{figure(value)} {unit}"
    return shown.strip()


def _say(text: str, style: str = "") -> None:
    for line in hanging(Text(text, style), room()):
        say(line)
