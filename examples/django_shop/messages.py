"""What the web service publishes: imported by it, and by the worker."""

import faregate as fg


class OrderPlaced(fg.Event):
    order_id: str
    total: int


class NewsletterWanted(fg.Event):
    email: str
