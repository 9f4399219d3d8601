"""A saga: an order that waits for its payment, and does not wait for ever."""
