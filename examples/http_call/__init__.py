"""A safe HTTP call: a handler may call twice, and the bank charges once."""
