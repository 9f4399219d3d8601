"""Whether what was published had its effects: each once, in order, after as many tries as it asked for.

The judge knows two things: what was confirmed to the publisher, by its publication id, and the rows of effects in the
order in which they were written. It knows nothing of brokers, ledgers or leases.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tests.rabbitmq.instance import Step

_SHOWN = 5


class Effect(NamedTuple):
    account: str
    number: int
    tries: int
    """How many tries failed before."""
    publication: str


def judge(published: Mapping[str, Step], effects: Sequence[Effect]) -> list[str]:
    """What is wrong; nothing, where everything held."""
    rows = Counter((effect.account, effect.number) for effect in effects)
    seen = {effect.publication for effect in effects}
    last: dict[str, int] = {}
    reordered: list[object] = []
    for effect in effects:
        if effect.number < last.get(effect.account, 0):
            reordered.append((effect.account, effect.number, "after", last[effect.account]))
        last[effect.account] = effect.number
    wanted = {(step.account, step.number): step.fails for step in published.values()}
    found = {
        "lost": [step for publication, step in published.items() if publication not in seen],
        "happened twice": [each for each, count in rows.items() if count > 1],
        "never confirmed": sorted(seen - published.keys()),
        "out of order": reordered,
        "other tries than asked for": [
            effect for effect in effects if effect.tries != wanted.get((effect.account, effect.number), effect.tries)
        ],
    }
    return [f"{len(what)} {name}: {what[:_SHOWN]}" for name, what in found.items() if what]
