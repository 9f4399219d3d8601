"""Stores: a node's database behind the port `faregate.ports.store`. Each backend is a folder that never imports another
one; `sql` holds what needs no driver. `faregate.ports.schemes.open_store` picks one by its URL."""
