"""A web service at the boundary of the bus: an HTTP request, its order and its event are one transaction."""
