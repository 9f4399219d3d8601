"""Tokens in the node's own database: the sender made one for the message, and handling it uses it up in the commit.

Whoever finds none is a duplicate. Without a token store one cannot know that: the token may be kept elsewhere.
"""

from collections.abc import Mapping, Sequence

from faregate.core.dedup import Dedup
from faregate.core.node_store import NodeStore
from faregate.core.work import Work
from faregate.errors import UnknownToken
from faregate.ports.store import Known, Transaction


class Tokens(Dedup):
    def __init__(self, shared: NodeStore) -> None:
        self._shared = shared
        self._tokens = shared.tokens

    async def admit(self, works: Sequence[Work]) -> None:
        if self._tokens is not None:
            for work in works:
                if await self._tokens.read(_token(work)) is None:
                    work.move("known")

    async def take(self, transaction: Transaction, works: Sequence[Work]) -> None:
        await self.commit(transaction, works)

    async def commit(self, transaction: Transaction, works: Sequence[Work]) -> None:
        left = [work for work in works if not work.consumed]
        consumed = await transaction.consume_tokens([_token(work) for work in left]) if left else ()
        for work in left:
            work.consumed = work.attempt_id in consumed
            if not work.consumed:
                work.move("known")

    def doubt(self, work: Work) -> None:
        if self._tokens is None and not work.in_ledger:
            work.fail(
                UnknownToken(
                    f"{work.envelope} was sent with a token that is not in this node's store, and this bus has no "
                    "token store: give it tokens=… as before and replay this; if it was handled already, discard it"
                )
            )

    async def release(self, work: Work) -> None:
        if work.state in ("folded", "filtered") or work.in_ledger:
            await self._shared.commit(lambda transaction: transaction.consume_tokens([_token(work)]))

    async def is_unhandled(self, transaction: Transaction, work: Work) -> bool:
        if await transaction.consume_tokens([_token(work)]):
            return True
        return self._tokens is None and not work.in_ledger  # as in `doubt`: nobody can know

    async def was_committed(self, work: Work, known: Mapping[str, Known]) -> bool:
        return work.consumed and self._tokens is not None and not await self._tokens.read(_token(work))


def _token(work: Work) -> str:
    assert work.attempt_id is not None
    return work.attempt_id
