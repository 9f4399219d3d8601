"""The Flask example: what is posted is published once per Idempotency-Key, by a service that has no table."""

from pathlib import Path

import pytest
from flask.testing import FlaskClient

from examples.flask_shop.app import app
from tests.examples.program import Program, count

SCAN = {"parcel_id": "17", "place": "Leipzig"}


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FlaskClient:
    monkeypatch.setenv("FLASK_SHOP_DATA", str(tmp_path))
    with Program(tmp_path, "-m", "faregate", "store", "init", "examples.flask_shop.worker:bus") as tables:
        tables.line("its tables are made")
    return app.test_client()


def test_a_scan_is_published_once_and_handled(client: FlaskClient, tmp_path: Path) -> None:
    answers = [client.post("/scans", json=SCAN, headers={"Idempotency-Key": "scan-1"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 202]
    assert answers[0].json == answers[1].json
    client.post("/scans", json={"parcel_id": "17", "place": "Rostock"}, headers={"Idempotency-Key": "scan-2"})
    arguments = ("-m", "faregate", "run", "examples.flask_shop.worker:bus")
    with Program(tmp_path, *arguments, FLASK_SHOP_DATA=str(tmp_path)) as worker:
        worker.line("parcel 17 is at Leipzig")
        worker.line("parcel 17 is at Rostock")
        worker.drain()
    assert count(tmp_path / "depot.db", "scans") == 2


def test_a_post_without_a_key_publishes_nothing(client: FlaskClient, tmp_path: Path) -> None:
    assert client.post("/scans", json=SCAN).status_code == 422
    assert count(tmp_path / "depot.db", "faregate_outbox") == 0
