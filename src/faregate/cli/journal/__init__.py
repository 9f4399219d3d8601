"""`faregate journal`."""
