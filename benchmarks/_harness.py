"""What the benchmarks share: interleaved rounds, medians, ratios, a table, and the JSON object on the last line.

Rules kept here, so that the figures mean something:
- All contestants run in one process, one after the other within each round; the order rotates from round to round.
  A ratio is the median over the rounds of the ratios within a round, so that a slow spell of the machine hits both.
- One round of everything is thrown away first, as warm-up (with `--rounds 0` it is all there is: the tests do that).
- Every timed piece starts behind a full collection, with the collector on and at its default thresholds, on a fresh
  event loop of the standard library (`loop`), whoever it belongs to.

(The name begins with `_` because `./dev bench` lists every other file of this folder as a benchmark.)
"""

import argparse
import asyncio
import gc
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

Run = Callable[[int], Awaitable[float]]
"""Handles that many messages and returns the seconds it took, without set-up and tear-down."""


@dataclass(frozen=True)
class Contestant:
    name: str
    run: Run
    share: float = 1.0
    """The part of `--messages` that it handles, below 1 for a slow one; rates stay comparable."""


@dataclass
class Samples:
    """Seconds per message of every contestant, round by round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def cost(self, name: str) -> float:
        """The median seconds per message."""
        return median(self.seconds[name])

    def rate(self, name: str) -> float:
        """The median messages per second."""
        return 1 / self.cost(name)

    def ratio(self, ours: str, other: str) -> float:
        """How many times faster `ours` is than `other`: the median of the ratios within each round."""
        pairs = zip(self.seconds[ours], self.seconds[other], strict=True)
        return median(theirs / mine for mine, theirs in pairs)


_processor: dict[str, list[float]] = {}
"""Processor seconds per message, by contestant, run by run."""


@contextmanager
def timed(name: str, messages: int) -> Iterator[list[float]]:
    """Gives a list that holds the seconds afterwards. Notes processor time by itself: that of all threads of this
    process, which suffers less from others on the machine."""
    took: list[float] = []
    begin, used = time.perf_counter(), time.process_time()
    yield took
    took.append(time.perf_counter() - begin)
    note_processor(name, (time.process_time() - used) / messages)


@contextmanager
def folder() -> Iterator[Path]:
    """An empty one, which is removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="faregate-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def note_processor(name: str, seconds: float) -> None:
    _processor.setdefault(name, []).append(seconds)


def processor(name: str) -> float:
    """The median processor seconds per message, without the warm-up."""
    found = _processor[name]
    return median(found[1:] or found)


def options(
    doc: str | None,
    *,
    rounds: int,
    messages: int,
    more: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> argparse.Namespace:
    """The command line that all benchmarks have; `doc` is the module's docstring, `more` adds to it."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--rounds", type=_count, default=rounds, help=f"rounds that count (default {rounds})")
    parser.add_argument("--messages", type=_positive, default=messages, help=f"messages a round (default {messages:,})")
    parser.add_argument("--json", action="store_true", help="print only the line of JSON")
    more(parser)
    return parser.parse_args()


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("must be 0 at least")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def interleave(contestants: Sequence[Contestant], *, rounds: int, messages: int) -> Samples:
    """Run every contestant in every round, behind one round of warm-up."""
    samples = Samples({contestant.name: [] for contestant in contestants})
    for number in range(rounds + 1):
        turn = number % len(contestants)
        for contestant in (*contestants[turn:], *contestants[:turn]):
            count = max(1, int(messages * contestant.share))
            gc.collect()
            seconds = loop(contestant.run(count))
            if number or not rounds:
                samples.seconds[contestant.name].append(seconds / count)
    return samples


def loop(work: Awaitable[float]) -> float:
    """Run one piece of work on a fresh event loop, the same kind for everybody."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(_as_coroutine(work))


async def _as_coroutine(work: Awaitable[float]) -> float:
    return await work


@dataclass
class Report:
    """Collects what a benchmark found. `ratios` and `targets` carry the same names; higher is better."""

    bench: str
    quiet: bool
    ours: dict[str, float] = field(default_factory=dict)
    peers: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    targets: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.say(f"{self.bench}: Python {platform.python_version()}, {os.cpu_count()} cores, load {_load()}")

    def goal(self, name: str, ratio: float, target: float) -> None:
        self.ratios[name] = ratio
        self.targets[name] = target

    @property
    def met(self) -> bool:
        return all(self.ratios[name] >= target for name, target in self.targets.items())

    def has_peer(self, module: str) -> bool:
        """Is it installed? `./dev bench` does that; the tests run with what there is."""
        if find_spec(module) is not None:
            return True
        self.say(f"without {module}, which is not installed: './dev bench {self.bench}' does that")
        return False

    def say(self, text: str = "") -> None:
        """A line for people."""
        if not self.quiet:
            print(text, flush=True)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Names to the left, figures to the right."""
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        self.say()
        for row in (head, ["-" * width for width in widths], *rows):
            cells = [cell.ljust(width) if not at else cell.rjust(width) for at, (cell, width) in _cells(row, widths)]
            self.say("  " + "  ".join(cells).rstrip())

    def finish(self) -> None:
        """Print the targets, then the JSON object as the last line."""
        rows = [
            (name, f"{ratio:.3g}", f">= {self.targets[name]:.3g}", "met" if ratio >= self.targets[name] else "MISSED")
            for name, ratio in self.ratios.items()
        ]
        self.table(("ratio (higher is better)", "measured", "target", ""), rows)
        self.say()
        found: dict[str, Any] = {
            "bench": self.bench,
            "ours": _rounded(self.ours),
            "peers": _rounded(self.peers),
            "ratios": _rounded(self.ratios),
            "targets": _rounded(self.targets),
            "met": self.met,
        }
        print(json.dumps(found), flush=True)


def _cells(row: Sequence[str], widths: Sequence[int]) -> Any:
    return enumerate(zip(row, widths, strict=True))


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{figure:.4g}") for name, figure in figures.items()}


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}" if sys.platform != "win32" else "unknown"
