"""Looking at a bus while it works: `fg.observe`.

    fg.Bus(…, observe=fg.observe.OpenTelemetry())       spans and metrics, by whatever SDK the process has set up
    fg.Bus(…, observe=fg.observe.Prometheus())          metrics, for a page that Prometheus reads
    async with fg.observe.serve(bus, port=9464): …      that page, and whether the process is alive and ready
    fg.observe.LogContext()                             a logging filter: which message a log record is about

Whoever uses none of them loads none of them, and pays for none.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from faregate.core.observer import Observer
from faregate.observe.endpoints import Endpoints, serve
from faregate.observe.logs import LogContext
from faregate.ports.extras import needs_extra

if TYPE_CHECKING:
    from faregate.observe.otel import OpenTelemetry
    from faregate.observe.prometheus import Prometheus

__all__ = ["Endpoints", "LogContext", "Observer", "OpenTelemetry", "Prometheus", "serve"]

_EXTRAS = {"OpenTelemetry": "otel", "Prometheus": "prometheus"}


if not TYPE_CHECKING:  # else every misspelled name would pass as Any

    def __getattr__(name: str) -> Any:
        """What needs a library of others is loaded at its first use. Raises `MissingExtra`."""
        if name not in _EXTRAS:
            raise AttributeError(f"module 'faregate.observe' has no attribute {name!r}")
        with needs_extra(_EXTRAS[name], f"fg.observe.{name}"):
            module = import_module(f"faregate.observe.{_EXTRAS[name]}")
        return getattr(module, name)
