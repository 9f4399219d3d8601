"""`faregate spark`."""
