"""A Flask service that publishes and has no table of its own."""
