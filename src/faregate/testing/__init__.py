"""For users' tests and ours: a bench with real broker semantics on a fake clock, fault points, and conformance
suites. Nothing in here needs pytest.

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="17", total=40))
        await bench.settle()
        assert bench.sent(ChargeCard) == [ChargeCard(order_id="17", amount=40)]
"""

from faregate.testing.bench import Bench, BenchStuck, bench
from faregate.testing.clock import FakeClock
from faregate.testing.codec_suite import CODEC_CASES
from faregate.testing.faults import crash_at, reached
from faregate.testing.log_capability_suite import CAPABILITY_CASES, capability_cases, run_capability_case
from faregate.testing.log_suite import LOG_CASES, LogSubject, journal_log_subject, run_log_case
from faregate.testing.queue_suite import (
    QUEUE_CASES,
    QueueSubject,
    journal_subject,
    memory_subject,
    queue_cases,
    run_queue_case,
)
from faregate.testing.store_subjects import (
    StoreSubject,
    TokenSubject,
    memory_store_subject,
    memory_token_subject,
    postgres_store_subject,
    postgres_token_subject,
    sqlite_store_subject,
    sqlite_token_subject,
)
from faregate.testing.store_suite import READER_CASES, STORE_CASES, run_store_case
from faregate.testing.token_suite import TOKEN_CASES, run_token_case

__all__ = [
    "CAPABILITY_CASES",
    "CODEC_CASES",
    "LOG_CASES",
    "QUEUE_CASES",
    "READER_CASES",
    "STORE_CASES",
    "TOKEN_CASES",
    "Bench",
    "BenchStuck",
    "FakeClock",
    "LogSubject",
    "QueueSubject",
    "StoreSubject",
    "TokenSubject",
    "bench",
    "capability_cases",
    "crash_at",
    "journal_log_subject",
    "journal_subject",
    "memory_store_subject",
    "memory_subject",
    "memory_token_subject",
    "postgres_store_subject",
    "postgres_token_subject",
    "queue_cases",
    "reached",
    "run_capability_case",
    "run_log_case",
    "run_queue_case",
    "run_store_case",
    "run_token_case",
    "sqlite_store_subject",
    "sqlite_token_subject",
]
