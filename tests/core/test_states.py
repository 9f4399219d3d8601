"""The table of states: closed, every state can come to an end, and what must not happen is not in it."""

import pytest

from faregate.core.states import DECIDED, RUNNING, TABLE, Event, State, after

ENDS = [state for state, ways in TABLE.items() if not ways]
EVENTS = sorted({event for ways in TABLE.values() for event in ways})


def reachable(state: State) -> set[State]:
    found: set[State] = {state}
    while len(found) < len(found := found | {to for each in found for to in TABLE[each].values()}):
        pass
    return found


def test_every_way_leads_to_a_state_of_the_table() -> None:
    assert {to for ways in TABLE.values() for to in ways.values()} <= set(TABLE)


def test_every_state_is_reached_from_the_first_one() -> None:
    assert reachable("new") == set(TABLE)


@pytest.mark.parametrize("state", TABLE)
def test_every_state_can_come_to_an_end(state: State) -> None:
    assert reachable(state) & set(ENDS)


@pytest.mark.parametrize("state", ENDS)
@pytest.mark.parametrize("event", EVENTS)
def test_nothing_happens_to_what_has_ended(state: State, event: Event) -> None:
    with pytest.raises(AssertionError, match=f"that is {state} cannot be {event}"):
        after(state, event)


def test_only_what_is_decided_is_settled() -> None:
    assert {state for state, ways in TABLE.items() if "settled" in ways} == DECIDED


def test_only_what_failed_becomes_a_dead_letter() -> None:
    assert [state for state, ways in TABLE.items() if "dead-lettered" in ways] == ["failed"]


def test_what_was_handled_before_never_runs() -> None:
    assert "succeeded" not in {event for state in TABLE if state != "new" for event in TABLE[state]}
    assert not reachable("duplicate") & RUNNING


def test_what_is_decided_waits_when_it_cannot_be_settled() -> None:
    assert all(TABLE[state]["put off"] == "waiting" and TABLE[state]["lost"] == "lost" for state in DECIDED)
