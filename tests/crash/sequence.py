"""Two hops that keep the order of each key, and what arrived at the end of them.

shop --Step--> first --Onward--> second
"""

from collections import defaultdict
from typing import Any, Literal

import faregate as fg

KEYS, LENGTH = 4, 12
SCHEMA = "create table if not exists arrivals (place integer primary key, lane text, number integer)"


class Step(fg.Event):
    lane: str
    number: int


class Onward(fg.Event):
    lane: str
    number: int


STEPS = [Step(lane=f"lane-{lane}", number=number) for number in range(LENGTH) for lane in range(KEYS)]


class Line:
    def __init__(self, dedup: Literal["ledger", "tokens"] = "ledger", **options: Any) -> None:
        self.shop, self.first = fg.Node("shop"), fg.Node("first")
        self.second = fg.Node("second", schema=SCHEMA)
        self.runs = 0

        @self.first.on(Step, source="shop", key="lane", dedup=dedup, **options)
        async def forward(step: Step, ctx: fg.Context) -> Onward:
            self.runs += 1
            await ctx.db.execute("select 1")
            return Onward(lane=step.lane, number=step.number)

        @self.second.on(Onward, source="first", key="lane", dedup=dedup, **options)
        async def arrive(onward: Onward, ctx: fg.Context) -> None:
            await ctx.db.execute("insert into arrivals (lane, number) values (?, ?)", (onward.lane, onward.number))

    @property
    def nodes(self) -> list[fg.Node]:
        return [self.shop, self.first, self.second]


async def arrivals(bus: fg.Bus) -> dict[str, list[int]]:
    """The numbers of each key, in the order in which they were committed at the second hop."""
    shared = bus._stores.of("second")
    assert shared is not None
    transaction = shared.store.transaction()
    await transaction.begin()
    try:
        rows = await transaction.fetchall("select lane, number from arrivals order by place")
    finally:
        await transaction.roll_back()
    found: defaultdict[str, list[int]] = defaultdict(list)
    for lane, number in rows:
        found[lane].append(number)
    return dict(found)


EVERYTHING = {f"lane-{lane}": list(range(LENGTH)) for lane in range(KEYS)}
