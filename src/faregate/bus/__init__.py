"""The asyncio engine: consumes from a queue transport, hands messages to the core, and dispatches what they send."""
