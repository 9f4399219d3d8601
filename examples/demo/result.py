"""What a run of the demo found, for the terminal, for JSON and for the report."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .flow import Progress
from .plan import Plan
from .timeline import PERCENTS, Timeline
from .verdict import Check


@dataclass
class Result:
    plan: Plan
    progress: Progress
    timeline: Timeline
    checks: Sequence[Check]
    dead: dict[str, int]
    """How many dead letters there are for each reason."""
    options: str = ""
    """Of the command, besides those of the plan."""
    judge: str = "plain SQL"
    """Who made the audit."""
    audit_ok: bool = False
    audit_summary: str = ""
    audit_table: Sequence[dict[str, Any]] = ()
    findings: Sequence[dict[str, Any]] = ()
    """Some of what is wrong, if anything is."""
    spark_tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    spark_seconds: float | None = None

    @property
    def held(self) -> bool:
        return self.audit_ok and all(check.held for check in self.checks)

    @property
    def killed(self) -> str:
        """What was, and how often."""
        times = Counter(self.progress.killed)
        return ", ".join(f"{name} {count} times" if count > 1 else name for name, count in times.items()) or "nothing"

    def as_dict(self) -> dict[str, Any]:
        progress = self.progress
        latency = {
            f"p{percent}": round(value, 3) for percent, value in zip(PERCENTS, self.timeline.overall, strict=False)
        }
        return {
            "orders": self.plan.orders,
            "seed": self.plan.seed,
            "copies": self.plan.copies,
            "seconds": round(progress.seconds, 3),
            "spark_seconds": None if self.spark_seconds is None else round(self.spark_seconds, 3),
            "messages": self.timeline.messages,
            "kills": [round(moment, 3) for moment in progress.kills],
            "killed": progress.killed,
            "pauses": [round(seconds, 3) for seconds in progress.pauses],
            "restarts": progress.restarts,
            "bank_timeouts": progress.timeouts,
            "duplicates_recognised": progress.duplicates,
            "latency_seconds": latency,
            "dead_letters": self.dead,
            "checks": [check.as_dict() for check in self.checks],
            "audit": {
                "by": self.judge,
                "ok": self.audit_ok,
                "summary": self.audit_summary,
                "table": list(self.audit_table),
                "findings": list(self.findings),
            },
            "held": self.held,
        }
