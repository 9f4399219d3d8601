"""A Django service at the boundary of the bus: an order, by the ORM, and its event are one transaction."""
