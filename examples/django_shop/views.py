"""The requests: `orders` writes a row and publishes in one transaction; `newsletter` has nothing to write.

`fg.outbox` takes the driver's connection, which Django has open inside of `transaction.atomic()`.
"""

import json
from typing import Any

from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path

import faregate as fg

from .messages import NewsletterWanted, OrderPlaced
from .models import Order


def publish(event: Any, key: str) -> str:
    """Record an event in the transaction that is open; a rollback takes it back."""
    if not connection.in_atomic_block:
        raise RuntimeError("publish within transaction.atomic(): else the event is committed by itself")
    connection.ensure_connection()
    outbox: fg.Outbox = fg.outbox(connection.connection, node="shop")
    return outbox.publish(event, idempotency_key=key)


def orders(request: HttpRequest) -> JsonResponse:
    key, body = request.headers.get("Idempotency-Key"), json.loads(request.body)
    if not key:
        return JsonResponse({"error": "Idempotency-Key is missing"}, status=422)
    with transaction.atomic():
        order, is_new = Order.objects.get_or_create(
            key=key, defaults={"customer": body["customer"], "total": body["total"]}
        )
        if is_new:
            publish(OrderPlaced(order_id=str(order.pk), total=order.total), key)
    return JsonResponse({"order_id": str(order.pk)}, status=201)


def newsletter(request: HttpRequest) -> JsonResponse:
    email = json.loads(request.body)["email"]
    with transaction.atomic():
        publish(NewsletterWanted(email=email), email)
    return JsonResponse({}, status=202)


urlpatterns = [path("orders", orders), path("newsletter", newsletter)]
