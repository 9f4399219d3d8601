"""The shop's journal, read by a data engineer: Spark SQL, and a streaming join. See README.md in this folder."""
