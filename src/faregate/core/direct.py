"""Handling without a store: run the pipeline, publish the outputs, settle.

    validate -> pipeline (middlewares, tries around the handler) -> publish outputs -> settle
                   `-- failed --> redeliver later, or a dead letter with the reason
    and in any case -> `after` middlewares

A crash between the publishing and the settling runs the handler again; its outputs keep their ids, so the broker's
window and the recipients' ledgers recognise them.
"""

from faregate.core.context import Context, Settled
from faregate.core.forks import end_if_forked, generation
from faregate.core.receiver import Receiver
from faregate.core.verdict import describe_error, failure_of, first_line
from faregate.ports import faults
from faregate.ports.queue import Delivery


class Direct(Receiver):
    async def handle(self, deliveries: list[Delivery]) -> list[Delivery]:
        for delivery in deliveries:
            await self.handle_one(delivery)
        return []

    async def handle_one(self, delivery: Delivery) -> None:
        delivery.start()
        ctx: Context | None = None
        outcome: Settled
        error: BaseException | None = None
        process = generation()
        try:
            ctx = self._open(delivery)
            try:
                await self._pipeline(ctx)
            finally:
                end_if_forked(process)
            if faults.hook is not None:
                await faults.hook("bus.after-handler")
            if not self._sends_in_scope and ctx._sent():
                await self._send_outputs(ctx)
        except BaseException as exc:
            failure = failure_of(exc)
            if failure is None:
                raise
            outcome, error = await self._fail(delivery, ctx, failure), failure
        else:
            if faults.hook is not None:
                await faults.hook("bus.before-settle")
            outcome = "handled" if ctx._completed else "skipped"
            await delivery.settle(outcome)
        if self._after is None and faults.hook is None:
            self.outcomes[outcome] += 1  # a coroutine less for every message
        else:
            await self._finish(delivery, ctx, outcome, error)

    async def _send_outputs(self, ctx: Context) -> None:
        if ctx._completed:
            await self._sender.publish_outputs(ctx, self.subscription.name, self._outgoing)

    async def _fail(self, delivery: Delivery, ctx: Context | None, exc: BaseException) -> Settled:
        verdict = self._judge(delivery, ctx, exc)
        if verdict.delay is None:
            await delivery.dead_letter(verdict.reason, describe_error(exc))
            self._gave_up(delivery, verdict.reason, first_line(exc))
            return "dead"
        await self.redeliver(delivery, verdict.delay, counted=verdict.counted)
        return "redelivered"
