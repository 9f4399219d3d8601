"""A shop in four services: orders are placed, billed, paid and shipped. See README.md in this folder."""
