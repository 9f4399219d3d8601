"""Every state of a message in a unit of work, and every way from one to the next. Pure; nothing else assigns a state.

    new --succeeded--> done ------------.
     |--known--------> duplicate -------|
     |--resumed------> resumed ---------+--settled--> settled
     |--folded-------> folded ----------|
     |--filtered-----> filtered --------'
     `--failed-------> failed --again--> again (runs alone, as a new one), --put off--> waiting, --dead-lettered--> dead
                         `--known--> duplicate: another copy was handled meanwhile

What has not run when its batch ends is new, and runs `again` in the next; or it is `released`, when nothing may begin.

A transaction that is rolled back takes its messages back: `undone` makes them new, `failed` ends them here. Whatever
was decided, or not yet, the delivery may turn out to be someone else's (`lost`), or the store may be away (`put off`).
"""

from collections.abc import Mapping
from typing import Literal

State = Literal[
    "new", "done", "duplicate", "resumed", "folded", "filtered", "failed", "settled", "again", "waiting", "dead",
    "released", "lost",
]  # fmt: skip
Event = Literal[
    "succeeded", "known", "resumed", "folded", "filtered", "failed", "undone", "settled", "again", "put off",
    "dead-lettered", "released", "lost",
]  # fmt: skip

TABLE: dict[State, Mapping[Event, State]] = {
    # Nothing has happened yet; or nothing of it is left.
    "new": {
        "succeeded": "done",
        "known": "duplicate",
        "resumed": "resumed",
        "folded": "folded",
        "filtered": "filtered",
        "failed": "failed",
        "again": "again",
        "released": "released",
        "lost": "lost",
    },
    # Its handler succeeded, or a middleware skipped it; it counts with the commit.
    "done": {
        "known": "duplicate",
        "undone": "new",
        "failed": "failed",
        "settled": "settled",
        "put off": "waiting",
        "lost": "lost",
    },
    # It was handled before, or another copy was faster.
    "duplicate": {"failed": "failed", "settled": "settled", "put off": "waiting", "lost": "lost"},
    # An earlier run committed it and could not finish.
    "resumed": {"settled": "settled", "put off": "waiting", "lost": "lost"},
    # A dead letter has it already; this copy is noted there.
    "folded": {"undone": "new", "failed": "failed", "settled": "settled", "put off": "waiting", "lost": "lost"},
    # Its subscription's filter does not take it: no handler will see it, and nothing is looked up or committed for it.
    "filtered": {"settled": "settled", "put off": "waiting", "lost": "lost"},
    # A try of it failed, or its transaction; nothing of that is left.
    "failed": {
        "again": "again",
        "known": "duplicate",
        "put off": "waiting",
        "dead-lettered": "dead",
        "released": "released",
        "lost": "lost",
    },
    # The ends. `again`: it runs alone, as a new one. `waiting`: it is delivered again later. `released`: it is back in
    # its place. `lost`: the delivery is someone else's.
    "settled": {},
    "again": {},
    "waiting": {},
    "dead": {},
    "released": {},
    "lost": {},
}

RUNNING: frozenset[State] = frozenset({"new", "done"})
"""In the running for this transaction: its marks are left in it."""
UNDECIDED: frozenset[State] = frozenset({"new", "failed"})
"""Something is left to be done."""
DECIDED: frozenset[State] = frozenset({"done", "duplicate", "resumed", "folded", "filtered"})
"""What became of it is committed, or needs no commit; what is left is to say so."""


def after(state: State, event: Event) -> State:
    """The state that follows. Raises `AssertionError` for what cannot happen."""
    following = TABLE[state].get(event)
    if following is None:
        raise AssertionError(f"a message that is {state} cannot be {event}")
    return following
