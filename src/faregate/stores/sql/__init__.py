"""What the SQL stores share and no driver is needed for: named queries, migrations, `?`, and values of columns."""
