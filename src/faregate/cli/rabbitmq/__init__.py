"""`faregate rabbitmq`."""
