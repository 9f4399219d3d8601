"""`format("faregate")`, read: ranges of a log as rows."""
