"""The archive of a log: its messages as Parquet files, by day and type, in a folder or an object store.

What an archive is (`layout`), where it lies (`target`), reading it (`reading`), and reading it and its log as one
(`joined`). Who writes it knows the log's segments: `faregate.broker.journal.archive`.
"""
