"""`format("faregate")`, written: staged by tasks, committed once by the driver."""
