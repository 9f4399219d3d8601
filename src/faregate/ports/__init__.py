"""Ports: the small protocols through which everything meets clocks, transports, logs and stores.

Each method carries its promise: what is atomic, which errors, what closing means. Adapters implement them; the
suites in `faregate.testing` check the promises.
"""
