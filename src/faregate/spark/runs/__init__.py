"""Handlers on Structured Streaming: `fg.spark.run`."""
