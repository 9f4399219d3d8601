"""SIGKILL at every fault point that a tick comes by: afterwards every tick ran once, and was heard of once.

All of it is in the long tier; `tests/bus/test_every.py` crashes at the ticker's own points in the default one.
"""

import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest

import faregate as fg
from faregate.testing.clock import START
from faregate.testing.store_subjects import postgres_schema
from faregate.transports.rabbitmq import RabbitmqQueue
from tests.child import Child
from tests.crash.places import LEDGER_POINTS, TICK_POINTS, query
from tests.presence import address
from tests.rabbitmq.rig import remove_queues

ROOT = Path(__file__).parents[2]
POINTS = (*TICK_POINTS, *(point for point in LEDGER_POINTS if not point.startswith("dispatch.")))
"""Without those that come with time: here it stands still until a tick is due."""
TICKS = 3


def command(**task: Any) -> list[str]:
    return [sys.executable, "-m", "tests.crash.ticking", msgspec.json.encode(task).decode()]


def run(folder: Path, minutes: int, **more: Any) -> tuple[int, str]:
    task = {"url": f"journal:{folder}/journal", "store": f"sqlite:{folder}/s.db", "minutes": minutes, **more}
    done = subprocess.run(command(**task), stdout=subprocess.PIPE, text=True, timeout=90, check=False, cwd=ROOT)
    return done.returncode, done.stdout


def minutes(*numbers: int) -> list[float]:
    """When the ticks are due; fake clocks do not start with a minute."""
    return [(START // 60 + number) * 60 for number in numbers]


@pytest.mark.full
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_point_every_tick_runs_once(point: str, tmp_path: Path) -> None:
    assert run(tmp_path, 0)[0] == 0, "the first start makes no tick"
    code, _ = run(tmp_path, 0, ticks=TICKS, kill=point, nth=2)
    assert code == -signal.SIGKILL, f"{point} was not reached twice; the process ended with {code}"
    assert run(tmp_path, TICKS + 2)[0] == 0
    for table in ("runs", "told"):
        assert ticks_in(f"sqlite:{tmp_path}/s.db", table, "ticking") == minutes(*range(1, TICKS + 3)), table


@pytest.mark.full
def test_the_points_are_those_that_a_run_reaches(tmp_path: Path) -> None:
    assert run(tmp_path, 0)[0] == 0
    code, counts = run(tmp_path, 0, ticks=TICKS)
    assert code == 0
    reached = msgspec.json.decode(counts.rpartition("reached ")[2], type=dict[str, int])
    assert set(reached) == set(POINTS)
    assert {point: count for point, count in reached.items() if count < TICKS} == {}


@pytest.mark.full
@pytest.mark.services
@pytest.mark.parametrize("point", [*TICK_POINTS, "unit.after-commit", "bus.before-publish", "dispatch.before-remove"])
async def test_where_one_of_two_instances_is_killed_every_tick_runs_once(point: str) -> None:
    broker, name = address("FAREGATE_TEST_RABBITMQ"), f"ticking_{uuid.uuid4().hex[:8]}"
    async with postgres_schema(address("FAREGATE_TEST_POSTGRES")) as store:
        with instance(broker, store, name) as other, instance(broker, store, name, kill=point, nth=2) as killed:
            assert killed.wait() == -signal.SIGKILL
            last = max(ticks_in(store, "runs", name), default=0.0)
            assert other.stdout is not None
            for _ in other.stdout:  # one line for each tick
                told = ticks_in(store, "told", name)
                if told[-1] > last and told == seconds_from(told[0], len(set(told))):
                    break
            other.communicate()
            assert other.returncode == 0
        runs, told = ticks_in(store, "runs", name), ticks_in(store, "told", name)
    assert runs == seconds_from(runs[0], len(runs)), "a tick is missing, or ran twice"
    assert told == runs[: len(told)], "the last ones may still be on their way when it stops"
    async with fg.Bus(broker, nodes=[fg.Node(name)]) as bus:
        assert isinstance(bus.transport, RabbitmqQueue)
        await remove_queues(bus.transport, f"{name}.tick-clean", f"{name}-audit.Ticked.{name}")


def instance(broker: str, store: str, name: str, **more: Any) -> Child:
    """One that runs by now."""
    task = {"url": broker, "store": store, "name": name, **more}
    started = Child(command(**task), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert started.stdout is not None
    assert started.stdout.readline() == "running\n"
    return started


def ticks_in(store: str, table: str, name: str) -> list[float]:
    return sorted(due for (due,) in query(store, f"select due from {table}_of_{name}"))


def seconds_from(first: float, count: int) -> list[float]:
    return [first + number for number in range(count)]
