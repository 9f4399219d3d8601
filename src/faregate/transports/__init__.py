"""Transports: adapters from the queue port to what really moves messages. They never import each other."""
