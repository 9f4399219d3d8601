"""The web service: `flask --app examples.flask_shop.app run`. It has no table; what it knows, it publishes.

A request gets its answer when the event is committed to the outbox. From then on it is not lost, whatever crashes.
"""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from flask import Flask, request
from flask.typing import ResponseReturnValue

import faregate as fg


class ParcelScanned(fg.Event):
    parcel_id: str
    place: str


def data_folder() -> Path:
    return Path(os.environ.get("FLASK_SHOP_DATA", "flask-data"))


app = Flask(__name__)


@app.post("/scans")
def post_scan() -> ResponseReturnValue:
    key = request.headers.get("Idempotency-Key")
    if not key:
        return {"error": "Idempotency-Key is missing"}, 422
    scan = ParcelScanned(**request.get_json())
    with closing(sqlite3.connect(data_folder() / "depot.db", timeout=10)) as connection, connection:
        publication = fg.outbox(connection, node="depot").publish(scan, idempotency_key=key)
    return {"publication_id": publication}, 202
