"""Ranges: every offset in exactly one, whatever the bounds; the same again for the same bounds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from faregate.spark.source.ranges import TASK_MESSAGES, OffsetRange, split

bounds = st.tuples(st.integers(0, 10**12), st.integers(0, 10 * TASK_MESSAGES))


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("012"), bounds, min_size=1), st.integers(1, 40))
def test_ranges_cover_every_offset_once(spans: dict[str, tuple[int, int]], least: int) -> None:
    starts = {name: start for name, (start, _) in spans.items()}
    ends = {name: start + length for name, (start, length) in spans.items()}
    found = split(starts, ends, least)
    assert found == split(starts, ends, least)
    for name in spans:
        own = [span for span in found if span.partition == name]
        edges = [starts[name], *(span.end for span in own)]
        assert [span.start for span in own] == edges[:-1]
        assert edges[-1] == ends[name]
        assert all(0 < span.end - span.start <= TASK_MESSAGES for span in own)
    assert len(found) >= min(least, max(ends[name] - starts[name] for name in ends))


def test_tasks_that_run_side_by_side_have_work_until_the_end() -> None:
    """Five tasks on two cores would leave one of these idle for a third of the time."""
    for length in (2, TASK_MESSAGES, 2 * TASK_MESSAGES + 1, 4 * TASK_MESSAGES, 5 * TASK_MESSAGES):
        found = split({"0": 7}, {"0": 7 + length}, 2)
        assert len(found) % 2 == 0, f"{length} messages are {len(found)} tasks"
        assert len(found) == 2 or len(found) * TASK_MESSAGES < length + 2 * TASK_MESSAGES, "more than are needed"


def test_a_small_read_is_one_task_unless_more_are_asked_for() -> None:
    assert split({"0": 5}, {"0": 8}, 1) == [OffsetRange("0", 5, 8)]
    assert split({"0": 5}, {"0": 8}, 2) == [OffsetRange("0", 5, 6), OffsetRange("0", 6, 8)]
    assert len(split({"0": 5}, {"0": 8}, 100)) == 3
    assert split({"0": 5}, {"0": 5}, 2) == split({"0": 6}, {"0": 5}, 2) == []
