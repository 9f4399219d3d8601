"""Power may be lost at any moment, in any state that the disk's promises allow: the log recovers from each of them.

The states come from the simulated disk: all of them by rule for a few scripts, and random ones for random scripts.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.journal.disk import SimulatedDisk
from tests.journal.rig import Command, check_every_state, check_recovery, open_log, run_script

SCRIPTS: dict[str, list[Command]] = {
    "one message": [("append", 1, 10), ("sync", 0, 0)],
    "two groups": [("append", 2, 10), ("sync", 0, 0), ("append", 1, 700), ("sync", 0, 0)],
    "a batch of several frames": [("append", 1, 10), ("sync", 0, 0), ("append", 8, 10), ("sync", 0, 0)],
    "a spooled batch of several frames": [("spool", 8, 10), ("sync", 0, 0)],
    "messages, a batch and dead letters in one group": [
        ("append", 1, 10),
        ("spool", 4, 10),
        ("dead", 1, 0),
        ("sync", 0, 0),
    ],
    "a new segment": [("append", 1, 9000), ("sync", 0, 0), ("append", 1, 9000), ("sync", 0, 0)],
    "a new segment within a group": [
        ("append", 1, 9000),
        ("sync", 0, 0),
        ("append", 1, 10),
        ("append", 1, 9000),
        ("sync", 0, 0),
    ],
    "a batch that is larger than a segment": [("append", 1, 20_000), ("sync", 0, 0)],
    "a group that is never synced": [("append", 1, 10), ("sync", 0, 0), ("append", 4, 10), ("dead", 2, 0)],
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=list(SCRIPTS))
def test_every_enumerated_state_after_a_power_loss_recovers(script: list[Command]) -> None:
    assert check_every_state(script) > 20


COMMANDS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 8), st.sampled_from([1, 100, 600, 3000])),
        st.tuples(st.just("append"), st.just(1), st.sampled_from([9000, 20_000])),
        st.tuples(st.just("spool"), st.integers(1, 8), st.sampled_from([1, 100])),
        st.tuples(st.just("dead"), st.integers(1, 3), st.just(0)),
        st.just(("sync", 0, 0)),
    ),
    min_size=1,
    max_size=12,
)

SETTINGS = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)


def choices(data: Any) -> Any:
    return lambda most: data.draw(st.integers(0, most))


@settings(SETTINGS, max_examples=150)
@given(script=COMMANDS, data=st.data())
def test_random_power_losses_recover(script: list[Command], data: Any) -> None:
    history = run_script(script)
    moment = data.draw(st.integers(0, len(history.disk.history)))
    left = history.disk.crash(choices(data), moment)
    check_recovery(left, history.confirmed(moment), history.units)


@settings(SETTINGS, max_examples=150)
@given(script=COMMANDS, data=st.data())
def test_a_power_loss_during_recovery_changes_nothing(script: list[Command], data: Any) -> None:
    history = run_script(script)
    moment = data.draw(st.integers(0, len(history.disk.history)))
    confirmed = history.confirmed(moment)
    left = history.disk.crash(choices(data), moment)
    for _ in range(2):
        open_log(left).close()
        left = left.crash(choices(data))
    check_recovery(left, confirmed, history.units)


@pytest.mark.full
@settings(SETTINGS, max_examples=5000)
@given(script=COMMANDS, data=st.data())
def test_very_many_random_power_losses_recover(script: list[Command], data: Any) -> None:
    test_random_power_losses_recover.hypothesis.inner_test(script, data)  # type: ignore[attr-defined]


def test_the_simulated_disk_forgets_what_was_not_synced() -> None:
    history = run_script([("append", 1, 10), ("sync", 0, 0), ("append", 1, 10)])
    states = [disk for moment, disk in history.disk.crash_states() if moment == len(history.disk.history)]
    sizes = {len([1 for data in disk.files().values() if b"1.0" in data]) for disk in states}
    assert sizes == {0, 1}, "both a disk with the unsynced message and one without it are among the states"
    assert all(isinstance(disk, SimulatedDisk) for disk in states)
