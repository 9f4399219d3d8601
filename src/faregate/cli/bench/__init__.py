"""`faregate bench`: what a bus, or a transport, carries of somebody's own messages."""
