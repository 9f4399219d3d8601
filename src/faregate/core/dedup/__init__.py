"""How copies of a message are recognised: by the ledger, by a token that its sender made, or not at all.

A role of the core. Each version works on the messages that are its own (`Work.dedup`), in this order:

    admit -> [ in the transaction: mark -> take, before a message's first statement -> commit, sent ] -> release
                                          `-- failed --> unmark
             [ a dead letter, in a transaction of its own: is_unhandled ] -> dead_lettered
"""

from collections.abc import Iterable, Mapping, Sequence

from faregate.core.work import Work
from faregate.ports.store import Known, Transaction


class Dedup:
    """By nothing: every copy is handled. The other versions do more at some of the steps."""

    one_by_one = False
    """Whether its messages come one at a time, as each is claimed in a commit of its own."""

    def enlist(self, work: Work) -> None:
        """It will be recognised in this way."""
        work.dedup = self

    async def admit(self, works: Sequence[Work]) -> None:
        """Before anything runs: which of them may not, as one knows by now."""

    async def mark(self, transaction: Transaction, works: Sequence[Work]) -> None:
        """First in every transaction: leave marks. Whoever finds another's mark is a duplicate."""

    async def take(self, transaction: Transaction, works: Sequence[Work]) -> None:
        """Before the first statement of their tries; undone with them. May find duplicates."""

    async def unmark(self, transaction: Transaction, works: Sequence[Work]) -> None:
        """These failed: no mark of them may be committed."""

    async def commit(self, transaction: Transaction, works: Sequence[Work]) -> None:
        """With the effects of these. May find duplicates; raises when nothing may be committed."""

    async def sent(self, transaction: Transaction, works: Sequence[Work]) -> None:
        """Note beside the marks how much the handlers sent, for the audit."""

    def doubt(self, work: Work) -> None:
        """It counts as a duplicate: is that certain?"""

    async def release(self, work: Work) -> None:
        """It is decided and not settled yet: what was kept to decide it may go, in the right order."""

    async def is_unhandled(self, transaction: Transaction, work: Work) -> bool:
        """In the commit of its dead letter: whether no copy was handled. With tokens, none can be after this commit."""
        return True

    async def dead_lettered(self, work: Work) -> None:
        """Its dead letter is committed."""

    async def was_committed(self, work: Work, known: Mapping[str, Known]) -> bool:
        """Whether what the message did is in the store, after a commit that was not ours."""
        return False


def by_dedup(works: Sequence[Work]) -> Iterable[tuple[Dedup, Sequence[Work]]]:
    """The messages of each version together; usually there is one."""
    versions = dict.fromkeys([work.dedup for work in works])
    if len(versions) < 2:
        return [(dedup, works) for dedup in versions]
    return [(dedup, [work for work in works if work.dedup is dedup]) for dedup in versions]
