"""The long lines of the proof matrix: drivers that really die, two of them at once, PostgreSQL that restarts,
speculation, a cluster, and random kills. Each driver is a process of its own (`matrix_driver`)."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

import faregate as fg
from faregate.broker.journal.reader import JournalReader
from faregate.errors import JournalLocked
from tests.crash.server import private_postgres
from tests.spark import run_shop
from tests.spark.matrix_driver import POINTS, SINK_POINTS, TOKEN_POINTS
from tests.spark.rabbitmq_rig import rabbitmq_shop
from tests.spark.run_rig import KEYS, Shop, TokenShop, open_token_shop

pytestmark = [pytest.mark.services, pytest.mark.full]
ROOT = Path(__file__).parents[2]
LONG = 300


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return open_shop(tmp_path)


def open_shop(folder: Path) -> Shop:
    made = Shop(folder, None)
    made.run_bus("shop", "payments")  # somebody takes what billing sends
    return made


def driver(
    shop: Shop, point: str = "never", master: str | None = None, *, node: str = "", **more: str
) -> "subprocess.Popen[str]":
    node = node or shop.node
    if shop.tokens is not None:
        more["MATRIX_TOKENS"] = shop.tokens
    store = "-" if node == "counting" else shop.store
    arguments = [node, shop.url, store, str(shop.folder / f"checkpoint-{node}"), point]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.spark.matrix_driver", *arguments, *([master] if master else [])],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: "subprocess.Popen[str]", *, dies: bool = False) -> str:
    said, _ = process.communicate(timeout=LONG)
    if dies:
        assert process.returncode == -signal.SIGKILL, said[-3000:]
    else:
        assert process.returncode == 0, said[-3000:]
    return said


def judge(shop: Shop, count: int) -> None:
    """Every order once and in order, by the rows; and by the audit, which knows nothing of handlers."""
    shop.check(count)
    command = [sys.executable, "-m", "faregate", "spark", "audit", shop.url, "--json", "--master", "local[2]"]
    node = shop.node
    chosen = ["--store", f"{node}={shop.store}", "--effects", f"{node}:select message_id from {shop.table}"]
    found = subprocess.run([*command, *chosen], cwd=ROOT, capture_output=True, text=True, timeout=LONG, check=False)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    [row] = [row for row in json.loads(found.stdout)["table"] if row["node"] == node]
    assert (row["published"], row["handled"], row["in_flight"]) == (count, count, 0), row


@pytest.mark.parametrize("point", POINTS[1:])
def test_the_driver_is_killed(shop: Shop, point: str) -> None:
    shop.place(20)
    finish(driver(shop, point), dies=True)
    finish(driver(shop))
    judge(shop, 20)


@pytest.fixture
def token_shop(tmp_path: Path) -> TokenShop:
    return open_token_shop(tmp_path, None)


@pytest.mark.parametrize("point", [*POINTS[1:], *TOKEN_POINTS])
def test_the_driver_is_killed_with_tokens_in_another_database(token_shop: TokenShop, point: str) -> None:
    token_shop.place(20)
    token_shop.arm(7, "kill")
    finish(driver(token_shop, point), dies=True)
    finish(driver(token_shop))
    judge(token_shop, 20)
    token_shop.check_all(20)


@pytest.mark.parametrize("point", SINK_POINTS)
def test_the_driver_is_killed_inside_the_commit_of_the_sink(shop: Shop, point: str) -> None:
    shop.place(20)
    finish(driver(shop, point, node="counting"), dies=True)
    assert not shop.log("Summed")
    finish(driver(shop, node="counting"))
    found = [msgspec.json.decode(each.body, type=run_shop.Summed) for each in shop.log("Summed")]
    assert sorted(each.number for each in found) == list(range(20))
    for key in {each.order_id for each in found}:
        numbers = [each.number for each in found if each.order_id == key]
        assert numbers == sorted(numbers)


def test_two_drivers_on_one_checkpoint(shop: Shop) -> None:
    shop.place(40)
    one, other = driver(shop), driver(shop)
    for each in (one, other):
        each.communicate(timeout=LONG)  # Spark lets one of them fail, or both go on
    finish(driver(shop))
    judge(shop, 40)


def test_available_now_repeated_to_a_fixpoint_while_appending(shop: Shop) -> None:
    shop.place(8)
    over = threading.Event()

    def append() -> None:
        while not over.wait(0.2) and shop.placed < 60:
            with suppress(JournalLocked):  # the driver has it for a moment, to take the spool in
                shop.place(4)

    appending = threading.Thread(target=append)
    appending.start()
    try:
        for _ in range(2):
            finish(driver(shop))
    finally:
        over.set()
        appending.join()
    finish(driver(shop))
    judge(shop, shop.placed)


KILLS, DRIVERS, ROUNDS = 11, 2, 4
"""In each of the four tests of random kills: deaths of workers in a running batch, so the three with a ledger have more
than 30; deaths of drivers that leave parked messages, 8 in all; and how often to go on until there are so many."""
PATIENT = "local[2,30]"
"""So many tries has a task."""


class RandomKills:
    def __init__(self, shop: Shop, seed: int) -> None:
        self.shop = shop
        self.chance = random.Random(seed)
        self.places: dict[int, str] = {}
        """Where the worker dies that handles this order."""
        self.failed: Counter[int] = Counter()
        """How often these orders were told to fail: the third time would make a dead letter."""
        self.drivers = 0
        """Those that died and left parked messages."""

    def place(self, count: int) -> None:
        """Orders, a quarter of which kill."""
        first = self.shop.placed
        self.shop.place(count)
        drawn = [self.chance.choice(run_shop.KILL_PLACES) for _ in range(count // 4)]
        for number, place in zip(self.chance.sample(range(first + 8, first + count), len(drawn)), drawn, strict=True):
            self.places[number] = place
            # Within a commit, or right behind one that was faster.
            delay = f" {self.chance.uniform(0, 0.001):.6f}" if place == "within-the-commit" else ""
            self.shop.arm(number, "kill", says=place + delay)

    def worker_deaths(self) -> Counter[str]:
        return Counter(place for number, place in self.places.items() if not self.shop.is_armed(number, "kill"))

    def is_enough(self) -> bool:
        died = self.worker_deaths()
        return self.drivers >= DRIVERS and died.total() >= KILLS and set(died) == set(run_shop.KILL_PLACES)

    def kill_driver(self) -> None:
        """Two of the orders that come first fail, most of all those that are parked, and what follows them is parked;
        then the driver dies at a point of its own, or it is killed at any moment from then on."""
        first = {number % KEYS: number for number in reversed(self.shop.unhandled())}
        chosen = self.chance.sample(sorted(first.values()), len(first))
        chosen = sorted((each for each in chosen if self.failed[each] < 2), key=lambda each: not self.failed[each])
        for number in chosen[:2]:
            self.failed[number] += not self.shop.is_armed(number, "bill")  # else its driver died too early
            for more in ("", "-again"):
                self.shop.arm(number, more=more)
        point = self.chance.choice(POINTS)
        process = driver(self.shop, point, PATIENT, MATRIX_AT_ONCE=str(self.chance.choice([4, 7])))
        if point == "never":
            self._kill_once_parked(process)
        else:
            finish(process, dies=True)
        self.drivers += process.returncode == -signal.SIGKILL and self.shop.count_parked() > 0

    def _kill_once_parked(self, process: "subprocess.Popen[str]") -> None:
        """Once it has parked something itself: what is parked by earlier ones has another due time."""
        due = "select message_id, due_at from faregate_parked"
        ended = threading.Thread(target=process.communicate)  # who reads what it says, so that it never waits for that
        ended.start()
        try:
            before, until = {*self.shop.rows(due)}, time.monotonic() + LONG
            while ended.is_alive() and {*self.shop.rows(due)} <= before and time.monotonic() < until:
                time.sleep(0.05)  # it is in a process of Spark's, which gives no signal
            ended.join(self.chance.uniform(0, 1))
        finally:
            if ended.is_alive():
                os.killpg(process.pid, signal.SIGKILL)
            ended.join()

    def finish(self) -> None:
        finish(driver(self.shop, "never", PATIENT, MATRIX_AT_ONCE=str(self.chance.choice([4, 7, 30]))))
        for _ in range(3):
            if self.shop.count_parked():
                self.shop.make_due()
                finish(driver(self.shop, "never", PATIENT))


@pytest.mark.parametrize(("kind", "seed"), [("ledger", 1), ("ledger", 2), ("ledger", 3), ("tokens", 4)])
def test_random_kills(tmp_path: Path, kind: str, seed: int) -> None:
    """Workers die in their batches, before the commit of the store, within it and after it; drivers wherever they are,
    while messages are parked. It goes on until enough of each kind have died."""
    shop = open_token_shop(tmp_path, None) if kind == "tokens" else open_shop(tmp_path)
    kills = RandomKills(shop, seed)
    for _ in range(ROUNDS):
        kills.place(60)
        for _ in range(2 * DRIVERS):
            if kills.drivers < DRIVERS and len(shop.unhandled()) > 20:
                kills.kill_driver()
        kills.finish()
        if kills.is_enough():
            break
    said = f"{kills.drivers} drivers with parked messages, workers {dict(kills.worker_deaths())}"
    print(said)
    assert kills.is_enough(), f"too few died: {said}"
    judge(shop, shop.placed)


class PostgresShop(Shop):
    """The node on Spark has its store on PostgreSQL, those on a bus have one on SQLite."""

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.store) as connection:
            return connection.execute(sql).fetchall()

    def beside(self) -> Shop:
        """The same as the nodes on a bus see it."""
        return Shop(self.folder, None, self.url)


def test_postgres_restarts_while_a_batch_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with private_postgres() as server:
        shop = PostgresShop(tmp_path, None)
        shop.store = server.url()
        shop.place(200)
        process = driver(shop, RUN_SHOP_POSTGRES="1", MATRIX_AT_ONCE="40")
        until = time.monotonic() + LONG
        while time.monotonic() < until:
            time.sleep(0.3)
            try:
                if shop.effects():
                    break
            except psycopg.Error:
                continue
        server.restart()
        process.communicate(timeout=LONG)
        finish(driver(shop, RUN_SHOP_POSTGRES="1", MATRIX_AT_ONCE="40"))
        judge(shop, 200)


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """A master and two workers on loopback, from the package of pyspark."""
    import pyspark

    home = Path(pyspark.__file__).parent
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_WORKER_DIR": str(folder / "work"),
    }
    port = 20_000 + os.getpid() % 10_000
    url = f"spark://127.0.0.1:{port}"
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, host: str, *arguments: str) -> None:
        command = [str(home / "bin/spark-class"), *arguments, "-h", host, "--webui-port", "0"]
        own = {**environment, "SPARK_LOCAL_IP": host}
        with (folder / f"{name}.log").open("wb") as log:
            started.append(subprocess.Popen(command, env=own, stdout=log, stderr=log, start_new_session=True))

    start("master", "127.0.0.1", "org.apache.spark.deploy.master.Master", "-p", str(port))
    try:
        for number in range(2):  # of two addresses: a speculative attempt never runs where the first one does
            worker = ["org.apache.spark.deploy.worker.Worker", "-c", "1", "-m", "1g", url]
            start(f"worker-{number}", f"127.0.0.{number + 2}", *worker)
        yield url
    finally:
        for each in started:
            with suppress(ProcessLookupError):  # a test killed it
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()


def test_a_second_attempt_is_started_by_speculation(shop: Shop) -> None:
    """On a cluster: a session on one machine never speculates. The first attempt waits in its handler until the second
    one is there, so both run at once. What they may do to each other at every moment is seen in the simulator, in
    test_matrix.py and in test_run_engine.py."""
    shop.place(40)
    shop.arm(0, "twin")
    with cluster(shop.folder) as master:
        said = finish(driver(shop, "never", master, MATRIX_SPECULATION="true", MATRIX_AT_ONCE="40"))
    [attempts] = [line.split()[2:] for line in said.splitlines() if line.startswith("speculative attempts")]
    assert attempts, said[-3000:]
    assert shop.hits("twin", [0]) == 1 and not shop.is_armed(0, "twin", "-waits"), "nobody else came to that order"
    judge(shop, 40)


def kill_executor(pid: int) -> None:
    """The worker of the cluster in whose executor this Python process runs: the worker, its executor, and all of that
    but for the Python process, which goes on as a zombie until it finds nobody to tell."""
    while "CoarseGrainedExecutorBackend" not in Path(f"/proc/{pid}/cmdline").read_text():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert pid > 1, "no executor above it"
    os.killpg(os.getpgid(pid), signal.SIGKILL)


@pytest.mark.parametrize("log", ["journal", "rabbitmq"])
def test_a_standalone_cluster(tmp_path: Path, log: str) -> None:
    """With a journal that all workers reach, and with the stream beside RabbitMQ's queues. A Python process dies in a
    batch, and then a whole worker of the cluster."""
    with ExitStack() as stack:
        server = stack.enter_context(private_postgres())
        if log == "rabbitmq":
            shop = stack.enter_context(rabbitmq_shop(tmp_path, None, PostgresShop))
        else:
            shop = PostgresShop(tmp_path, None)
        shop.store = server.url()
        master = stack.enter_context(cluster(tmp_path))
        shop.beside().run_bus("shop", "payments")
        shop.place(24)
        shop.arm(5, "kill")
        shop.arm(14, "slow")
        process = driver(shop, "never", master, RUN_SHOP_POSTGRES="1")
        try:
            kill_executor(shop.wait_for_slow(14, LONG))
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finish(process)
        assert shop.hits("kill", [5]) == 1
        judge(shop, 24)
        shop.beside().run_bus("payments")
        shop.beside().check(24, "charges")


def test_the_whole_log_is_there_for_others(shop: Shop) -> None:
    """What a killed driver sent is in the log once."""

    async def receive() -> None:
        async with fg.Bus(f"journal:{shop.journal}", nodes=[run_shop.payments], store=shop.store) as bus:
            await bus.idle()

    asyncio.run(receive())
    shop.place(20)
    finish(driver(shop, "in-dispatch"), dies=True)
    finish(driver(shop))
    asyncio.run(receive())
    judge(shop, 20)
    shop.check(20, "charges")
    sent = [each for _, each in JournalReader(shop.journal).envelopes() if each.type == "ChargeCard"]
    assert len(sent) == len({each.publication_id for each in sent}) == 20
