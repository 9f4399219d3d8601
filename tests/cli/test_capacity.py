"""What a load needs, from what a message costs: by hand, over random loads, and as the command shows it."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from faregate.cli import app
from faregate.cli.capacity import commands
from faregate.cli.capacity.costs import KNOWN, Costs, Figure, load_costs, with_given, write_costs
from faregate.cli.capacity.load import ENGINES, Load
from faregate.cli.capacity.plan import Part, Plan, make_plan
from faregate.cli.capacity.words import bytes_of, figure
from faregate.cli.output import console
from faregate.errors import ConfigurationError

_RATES = ("commits", "queue_rate", "stream_rate", "database_disk", "disk_write", "network")


def costs(**given: float) -> Costs:
    """Each figure is 1, but for those that are given; servers have one core, and no limit but that."""
    plain = dict.fromkeys(KNOWN, 1.0) | dict.fromkeys(_RATES, 1e30)
    return Costs("2026-01-02", "2 cores", "by hand", {k: Figure(v, "given") for k, v in (plain | given).items()})


def part(plan: Plan, name: str) -> Part:
    [found] = [each for each in plan.parts if each.name == name]
    return found


JOURNAL = "journal, and the process that runs it"


def test_one_journal_takes_what_its_process_does() -> None:
    found = costs(publish=10, handle_sqlite=40, busy=0.5)
    plan = make_plan(Load(25_000, engine="journal", store="sqlite"), found)
    journal = part(plan, JOURNAL)
    assert journal.limit.rate == journal.stops_at == 10_000
    assert journal.needed(25_000, plan.shards) == plan.shards == 3
    assert journal.limit.how == "50% of a core ÷ (publish 10 + handle_sqlite 40) µs"
    assert plan.first_stop is journal


def test_every_node_handles_and_sends() -> None:
    found = costs(publish=10, handle_sqlite=40, send_sqlite=20)
    plan = make_plan(Load(1_000, recipients=2, sent=0.5, engine="journal", store="sqlite"), found)
    assert part(plan, JOURNAL).limit.rate == pytest.approx(1e6 / (10 + 2 * 40 + 2 * 0.5 * 20))


def test_a_database_is_limited_by_the_tightest_of_four() -> None:
    load = Load(1_000, sent=1, ledger_days=1)
    tight = {
        "database": 100.0,  # and 1 for what is sent: 9,900.99 a second
        "commits": 5.0,
        "wal": 1e27,
        "ledger_postgresql": 1e30 / 86_400 / 7,
    }
    found = {name: part(make_plan(load, costs(**{name: value})), "PostgreSQL").limit for name, value in tight.items()}
    assert found["database"].rate == pytest.approx(1e6 / 101)
    assert found["commits"].rate == 5
    assert found["wal"].rate == pytest.approx(1_000)
    assert found["ledger_postgresql"].rate == pytest.approx(7)
    assert "days of rows" in found["ledger_postgresql"].how or "1 day of rows" in found["ledger_postgresql"].how


def test_a_subscription_without_order_has_one_queue_and_one_with_order_256_at_most() -> None:
    plan = make_plan(Load(100, keyed=0.25), costs(queue_rate=2_000, busy=0.5))
    free, ordered = part(plan, "queue without order"), part(plan, "queue partition")
    assert free.stops_at == pytest.approx(1_000 / 0.75)
    assert ordered.stops_at == pytest.approx(256 * 1_000 / 0.25)
    assert part(plan, "handler process without order").stops_at == math.inf


def test_replicas_cost_the_brokers_and_a_cluster_ends() -> None:
    plan = make_plan(Load(100, keyed=1), costs(queue_in=10, queue_out=5, replicas=3, brokers=5, broker_cores=4))
    broker = part(plan, "RabbitMQ node")
    assert broker.limit.rate == pytest.approx(4e6 / 35)
    assert broker.stops_at == pytest.approx(5 * 4e6 / 35)
    assert broker.needed(100, plan.shards) == 3, "a replica has a node of its own"


def test_handlers_with_a_store_have_64_tasks_on_spark_and_those_without_any_number() -> None:
    load = Load(1_000_000, engine="spark")
    assert part(make_plan(load, costs(stream_rate=300_000)), "stream").needed(1_000_000, 1) == 4
    assert part(make_plan(load, costs(spark_postgresql=99)), "Spark core").stops_at == pytest.approx(64 * 10_000)
    bare = make_plan(replace(load, store="none", keyed=0.0), costs(spark_none=99))
    assert part(bare, "Spark core").stops_at == math.inf
    assert part(bare, "Spark core").needed(1_000_000, 1) == 100
    three = make_plan(replace(bare.load, sent=3.0), costs(spark_none=33))
    assert part(three, "Spark core").limit.rate == 10_000, "one that is sent is in its cost"
    assert not [each for each in bare.parts if each.name == "Spark driver"], "nothing is sent"


def test_no_number_of_shards_helps_a_key_that_is_too_hot() -> None:
    found = costs(key_postgresql=10)
    hot = make_plan(Load(1_000, hot=0.2), found)
    assert part(hot, "hottest key").stops_at == pytest.approx(500)
    assert hot.too_hot and hot.shards == 1
    assert not make_plan(Load(1_000, hot=0.05), found).too_hot
    assert not make_plan(Load(1_000, keys=1_000), found).too_hot, "all keys as frequent"


def test_bytes_are_counted_with_replicas_and_nodes() -> None:
    load = Load(10, body=200, recipients=2, retain_days=1, ledger_days=2, engine="spark")
    amounts = {each.name: each.bytes for each in make_plan(load, costs(stream_bytes=300, replicas=3)).amounts}
    assert amounts["log on disk"] == 10 * 86_400 * 500 * 3
    assert amounts["ledgers"] == 10 * 2 * 2 * 86_400
    assert amounts["network of the brokers, in and out"] == 10 * 500 * (1 + 2 + 2)


LOADS = st.builds(
    Load,
    rate=st.floats(1, 1e7),
    body=st.integers(1, 1_000_000),
    recipients=st.integers(1, 20),
    sent=st.integers(0, 40).map(lambda quarters: quarters / 4),
    keyed=st.floats(0, 1),
    keys=st.integers(1, 10**9),
    retain_days=st.floats(0, 1_000),
    ledger_days=st.floats(0, 1_000),
    engine=st.sampled_from([*ENGINES]),
    store=st.just("postgresql"),
)
SHIPPED = load_costs(None)


@settings(max_examples=50, deadline=None)
@given(LOADS)
def test_what_is_needed_is_enough_and_one_less_is_not(load: Load) -> None:
    plan = make_plan(load, SHIPPED)
    for each in plan.parts:
        if not each.is_sharded:
            assert each.needed(load.rate, plan.shards) == 1
            continue
        needed = each.needed(load.rate, plan.shards) // each.each
        assert needed * each.limit.rate >= load.rate * each.share * (1 - 1e-9)
        least = max(each.least, plan.shards) if each.most == 1 else each.least
        assert needed == least or (needed - 1) * each.limit.rate < load.rate * each.share
        assert each.limit.rate == min(limit.rate for limit in each.limits)
        assert each.stops_at * plan.shards >= load.rate * (1 - 1e-9)
    assert make_plan(replace(load, rate=load.rate * 2), SHIPPED).shards >= plan.shards


TERM = re.compile(r"([-+]?) ?(?:([\d.,]+) × )?(\w+) ([\d.,]+)")


@settings(max_examples=50, deadline=None)
@given(LOADS)
def test_the_sum_that_is_shown_is_the_one_that_is_computed(load: Load) -> None:
    for each in make_plan(load, SHIPPED).parts:
        for limit in each.limits:
            found = re.fullmatch(r"(\d+)% of (?:a|([\d.,]+)) cores? ÷ \(?(.*?)\)? µs", limit.how)
            if found is None:
                continue
            micros = 0.0
            for sign, times, name, value in TERM.findall(found[3]):
                assert name in KNOWN
                micros += (-1 if sign == "-" else 1) * number(times or "1") * number(value)
            shown = int(found[1]) / 100 * number(found[2] or "1") * 1e6 / micros
            assert shown == pytest.approx(limit.rate, rel=0.03), limit.how


def number(text: str) -> float:
    return float(text.replace(",", ""))


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ({"rate": 0}, "--rate is 0"),
        ({"rate": math.nan}, "--rate is nan"),
        ({"rate": 1, "keyed": 1.5}, "--keyed is 1.5: it must be 0 or more, and at most 1"),
        ({"rate": 1, "keyed": 0.1, "hot": 0.2}, "--hot is 0.2"),
        ({"rate": 1, "retain_days": -1}, "--retain-days is -1"),
        ({"rate": 1, "engine": "spark", "store": "sqlite"}, "a file of one machine"),
        ({"rate": 1, "engine": "rabbitmq", "store": "none"}, "the order of a key needs a store"),
    ],
)
def test_a_load_that_cannot_be_is_refused(load: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        Load(**load)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("load", "given", "words"),
    [
        ({"rate": 1e308}, {}, "too large"),
        ({"rate": 1, "body": 10**400}, {}, "too large"),
        ({"rate": 1, "keys": 10**400}, {}, "too large"),
        ({"rate": 1, "recipients": 10**400}, {}, "too large"),
        ({"rate": 1, "sent": 1e308}, {"send_postgresql": 100.0}, "too large"),
        ({"rate": 1, "ledger_days": 1e308}, {}, "too large"),
        ({"rate": 1}, {"wal": 1.7e308, "disk_write": 1e-300}, "too small"),
        ({"rate": 1}, {"handle_none": 500.0}, "- handle_none 500) µs is less than nothing"),
    ],
)
def test_what_cannot_be_computed_is_said_in_a_sentence(
    load: dict[str, float], given: dict[str, float], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        make_plan(Load(**load), costs(**given))  # type: ignore[arg-type]


def test_a_file_of_costs_is_read_back(tmp_path: Path) -> None:
    write_costs(costs(publish=7), tmp_path / "costs.json")
    assert load_costs(tmp_path / "costs.json") == costs(publish=7)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no file of costs"),
        ('{"date": "", "machine": "", "command": "", "figures": {}}', "has no publish"),
        ('{"date": "", "machine": "", "command": "", "figures": {}, "more": 1}', "unknown field `more`"),
    ],
)
def test_a_file_that_is_none_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        load_costs(tmp_path / "costs.json")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_costs(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("publsh=1", "there is no figure 'publsh'"),
        ("publish=fast", "'fast' is no number"),
        ("publish=0", "must be more than 0"),
        ("busy=2", "at most 1"),
        ("brokers=2", "replicas is 3, and must be 1 or more, and at most brokers, which is 2"),
        ("replicas=0.4", "replicas is 0.4"),
    ],
)
def test_a_figure_that_cannot_be_is_refused(given: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        with_given(SHIPPED, [given])


def test_the_costs_that_come_with_faregate_name_no_machine() -> None:
    text = msgspec.json.encode(SHIPPED).decode()
    assert "cores" in SHIPPED.machine
    assert not re.search(r"://|/work|/tmp|/home|\d+\.\d+\.\d+\.\d+", text)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(console, "_width", 80)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rate", ["20000", "1000000"])
@pytest.mark.usefixtures("narrow")
def test_the_tables_fit_80_columns(engine: str, rate: str) -> None:
    done = CliRunner().invoke(app, ["capacity", "--rate", rate, "--engine", engine, "--sent", "1", "--hot", "0.9"])
    assert done.exit_code == 0, done.output
    assert [line for line in done.output.splitlines() if len(line) > 80] == []
    for words in ("NEEDED", "WHERE IT STOPS", "the first to be full", "no number of machines helps"):
        assert words in " ".join(done.output.split()), "lines are wrapped"


def test_json_of_a_limit_that_is_none_is_null() -> None:
    done = CliRunner().invoke(app, ["capacity", "--rate", "1", "--ledger-days", "1e-320", "--json"])
    assert done.exit_code == 0 and "Infinity" not in done.output


def test_json_has_every_limit_and_what_then() -> None:
    done = CliRunner().invoke(app, ["capacity", "--rate", "50000", "--set", "database_cores=64", "--json"])
    found = json.loads(done.output)
    [database] = [each for each in found["parts"] if each["part"] == "PostgreSQL"]
    assert len(database["limits"]) == 4 and "shard" in database["then"]
    assert found["costs"]["database_cores"] == {"value": 64.0, "origin": "given"}
    assert found["load"]["rate"] == 50_000 and found["shards"] >= 1


@pytest.mark.usefixtures("narrow")
def test_the_costs_are_shown_with_where_they_come_from() -> None:
    done = CliRunner().invoke(app, ["capacity", "costs"])
    lines = done.output.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert all(any(line.startswith(f"{name} ") for line in lines) for name in KNOWN)
    assert "assumed" in done.output


def test_a_file_of_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_bytes('{"date": "", "machine": "zwölf"}'.encode("latin-1"))
    with pytest.raises(ConfigurationError, match="is no file of costs: 'utf-8' codec"):
        load_costs(tmp_path / "costs.json")


@pytest.mark.parametrize("rate", ["0.25", "1e-320"])
def test_a_rate_below_one_is_a_rate(rate: str) -> None:
    done = CliRunner().invoke(app, ["capacity", "--rate", rate])
    assert done.exit_code == 0, done.exception
    assert done.output.startswith(f"{float(rate):.3g} messages a second") and "One shard is enough" in done.output


def test_without_a_rate_it_asks_for_one() -> None:
    done = CliRunner().invoke(app, ["capacity"])
    assert done.exit_code == 1 and "--rate 1000" in str(done.exception)


def test_a_server_is_measured_only_if_somebody_says_yes(tmp_path: Path) -> None:
    command = ["capacity", "measure", f"{tmp_path}/costs.json"]
    for option in (["--store", "postgresql://me:secret@db/x"], ["--broker", "amqp://me:secret@broker/"]):
        done = CliRunner().invoke(app, [*command, *option])
        assert isinstance(done.exception, ConfigurationError) and "--yes" in str(done.exception)
        assert "secret" not in str(done.exception)
    done = CliRunner().invoke(app, [*command, "--part", "kafka"])
    assert "there is journal, postgresql, rabbitmq, spark" in str(done.exception)
    done = CliRunner().invoke(app, [*command, "--part", "rabbitmq"])
    assert "needs an address: --broker URL" in str(done.exception)
    assert not (tmp_path / "costs.json").exists()


@pytest.mark.parametrize("place", ["nowhere/costs.json", "."])
def test_nothing_is_measured_if_the_file_cannot_be_written(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_measured", lambda *given: pytest.fail("it measured"))
    done = CliRunner().invoke(app, ["capacity", "measure", str(tmp_path / place)])
    assert isinstance(done.exception, ConfigurationError) and "cannot be written to" in str(done.exception)


def test_nothing_is_measured_if_the_other_costs_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_measured", lambda *given: pytest.fail("it measured"))
    (tmp_path / "broken.json").write_text("[]")
    given = ["capacity", "measure", str(tmp_path / "costs.json"), "--costs", str(tmp_path / "broken.json")]
    assert "is no file of costs" in str(CliRunner().invoke(app, given).exception)
    assert not (tmp_path / "costs.json").exists()


def test_what_was_measured_is_kept_when_a_later_part_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*given: object) -> Iterator[tuple[str, dict[str, float]]]:
        yield "journal", {"publish": 12.345}
        raise ConfigurationError("there is no stream on port 5")

    monkeypatch.setattr(commands, "_measured", measured)
    file = tmp_path / "costs.json"
    given = ["--part", "journal", "--part", "rabbitmq", "--broker", "amqp://broker/", "--yes"]
    done = CliRunner().invoke(app, ["capacity", "measure", str(file), *given])
    assert "no stream on port 5" in str(done.exception)
    costs = load_costs(file)
    assert costs["publish"] == 12.3 and costs.figures["amqp_publish"].origin == "assumed"
    assert costs.command == "faregate capacity measure --part journal --messages 20000 --rounds 3"


def test_figures_are_rounded_to_what_counts() -> None:
    assert [figure(value) for value in (0.6, 12.345, 123.4, 1_234_567, 3)] == ["0.6", "12.3", "123", "1,230,000", "3"]
    assert [bytes_of(count) for count in (999, 1_000, 550, 2.5e9, 4e12, 9.9e15)] == [
        "999 B", "1 kB", "550 B", "2.5 GB", "4 TB", "9.9 PB",
    ]  # fmt: skip
