"""The handling core: one way through a handler, for the bus and for Spark."""
