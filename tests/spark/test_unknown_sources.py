"""A run on Spark says at its start when it waits for events of a node that the log knows nothing of."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.ports import schemes
from faregate.ports.log import LogTransport
from faregate.spark.runs import unknown_sources
from faregate.spark.runs.unknown_sources import warn_of_unknown_sources


class Placed(fg.Event):
    order: str


class Billed(fg.Event):
    order: str


shop, audit = fg.Node("shop"), fg.Node("audit")
lost = fg.Node("lost")


@audit.on(Billed, source="billing")
async def note(billed: Billed) -> None: ...


@lost.on(Placed, source="shpo")
def wait(placed: Placed) -> None: ...


def node_for(source: str) -> fg.Node:
    node = fg.Node("billing")

    @node.on(Placed, source=source)
    def bill(placed: Placed) -> None: ...

    return node


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """In which shop has a message, and audit a subscription."""

    async def main() -> None:
        async with fg.Bus(f"journal:{tmp_path}/journal", nodes=[shop, audit]) as bus:
            await bus.publish(Placed(order="17"), node="shop")

    asyncio.run(main())
    return tmp_path / "journal"


@pytest.mark.parametrize("source", ["shop", "audit", "billing"])
def test_a_node_that_the_log_knows_is_not_warned_of(
    journal: Path, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_unknown_sources(node_for(source), journal)
    assert not caplog.messages


def test_no_more_is_read_than_the_last_messages(
    journal: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unknown_sources, "_READ", 0)
    warn_of_unknown_sources(node_for("shop"), journal)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "or is the source of one of the last 0 messages" in caplog.text, "what was not read may be from it"


def test_a_log_that_cannot_tell_keeps_no_run_from_starting(
    journal: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(self: object) -> int:
        raise fg.OffsetGone("it was removed meanwhile")

    monkeypatch.setattr(type(schemes.open_log(journal, LogTransport)), "earliest", gone)
    with caplog.at_level(logging.INFO):
        warn_of_unknown_sources(node_for("shpo"), journal)
    assert not caplog.messages


@pytest.mark.services
def test_a_run_says_at_its_start_that_nobody_publishes_what_it_waits_for(
    journal: Path, tmp_path: Path, spark: Any, caplog: pytest.LogCaptureFixture
) -> None:
    handle = fg.spark.run(lost, spark, source=journal, checkpoint=tmp_path / "checkpoint")
    handle.await_termination()
    text = "wait at lost (Placed from shpo) waits for events of node 'shpo', and the log knows no such node"
    assert f"{text} (did you mean 'shop'?)" in caplog.messages
