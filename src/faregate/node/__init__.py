"""What a node declares: its subscriptions, their order and policies, and what handlers return. No I/O."""
