"""Messages as rows with typed columns: `fg.spark.read` and `fg.spark.read_stream`."""
