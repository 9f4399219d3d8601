"""A log and its archive as one log: what the log has no more comes from the archive, everything else from the log.

Rules kept here:
- Every message comes once, from one side: the archive ends where the log begins, at the moment of reading. If retention
  moves that meanwhile, reading goes on in the archive, which has what retention removes.
- Offsets that neither side has are lost. Who reads is told before anything behind them, and decides.
"""

from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence

from faregate.archive.reading import Archive
from faregate.columns import to_envelopes
from faregate.errors import NotAnArchive, OffsetGone
from faregate.message import Envelope
from faregate.ports.log import ArrowBatch, LogPart, LogTransport, ReaderOffset, Stretch, is_outlined


class ArchivedLog:
    """Raises `NotAnArchive` when the archive is another log's."""

    def __init__(
        self,
        log: LogTransport,
        archive: Archive,
        on_loss: Callable[[OffsetGone], None],
        *,
        types: Sequence[str] = (),
        sources: Sequence[str] = (),
    ) -> None:
        """`on_loss` raises what it is told, or lets reading go on behind it. With `types` or `sources`, messages that
        are not of these may be left out."""
        if archive.meta.log != log.log_id:
            raise NotAnArchive(
                f"{archive.target.shown} is the archive of the log {archive.meta.log}, and {log.name} is the log "
                f"{log.log_id}"
            )
        self.name = f"{log.name} with its archive {archive.target.shown}"
        self.log_id = log.log_id
        self._log = log
        self._archive = archive
        self._on_loss = on_loss
        self._types, self._sources = types, sources

    def earliest(self) -> int:
        first = self._log.earliest()
        spans = self._archive.spans()
        return min(first, spans[0].base) if spans else first

    def latest(self) -> int:
        return self._log.latest()

    def offset_at(self, time: float) -> int:
        found = self._archive.offset_at(time, self._log.earliest())
        return self._log.offset_at(time) if found is None else found

    def batches(self, start: int = 0, end: int | None = None, *, rows: int | None = None) -> Iterator[ArrowBatch]:
        latest = self.latest()
        stop = latest if end is None else min(end, latest)
        if start < self.earliest():
            raise OffsetGone(f"{self.name} begins at offset {self.earliest()}; reading was to start at {start}")
        if start > latest:
            raise OffsetGone(f"offset {start} is not in {self.name} yet: it ends at {latest}")
        while start < stop:
            first = self._log.earliest()
            if start < first:
                start = yield from self._archived(start, min(stop, first), first, rows)
                continue
            try:
                for batch in self._log.batches(start, stop, rows=rows):
                    yield batch
                    start = batch.column("offset")[-1].as_py() + 1
                return
            except OffsetGone:
                if self._log.earliest() <= start:
                    raise  # it is not retention that went by

    def _archived(self, start: int, stop: int, first: int, rows: int | None) -> Generator[ArrowBatch, None, int]:
        """What one segment of the archive has of these; returns where to go on. The log begins at `first`."""
        span = self._archive.at(start)
        if span is None:
            behind = min([first, *(each.base for each in self._archive.spans() if each.base > start)])
            self._on_loss(
                OffsetGone(
                    f"the messages from {start} to {behind - 1} are missing in {self.name}: retention removed them "
                    "before they were archived. Start behind them, or set failOnDataLoss=false to go on without them"
                )
            )
            return behind
        behind = min(span.end, stop)
        try:
            yield from self._archive.batches(span, start, behind, rows=rows, types=self._types, sources=self._sources)
        except OffsetGone as loss:
            self._on_loss(loss)
        return behind

    def stretches(self, start: int, end: int) -> Iterator[Stretch]:
        """By the manifests of the archive, and as the log knows it."""
        stop = min(end, self._log.earliest())
        for span in self._archive.spans() if start < stop else ():
            first, behind = max(start, span.base), min(stop, span.end)
            if first < behind:
                if start < first:  # on neither side
                    yield Stretch(start, first)
                yield self._archive.stretch(span, first, behind)
                start = behind
        if start < stop:
            yield Stretch(start, stop)
            start = stop
        if start < end:
            yield from self._log.stretches(start, end) if is_outlined(self._log) else [Stretch(start, end)]

    def envelopes(self, start: int = 0, end: int | None = None) -> Iterator[tuple[int, Envelope]]:
        for batch in self.batches(start, end):
            yield from zip(batch.column("offset").to_pylist(), to_envelopes(batch), strict=True)

    def load(self, offsets: list[int]) -> list[Envelope]:
        first = self._log.earliest()
        archived = [offset for offset in offsets if offset < first]
        found = [envelope for offset in archived for _, envelope in self.envelopes(offset, offset + 1)]
        return found + self._log.load(offsets[len(archived) :])

    def parts(self, start: int | None = None, end: int | None = None) -> list[LogPart]:
        first = self._log.earliest()
        stop = first if end is None else min(end, first)
        spans = [(span.base, max(span.base, start or 0), min(span.end, stop)) for span in self._archive.look()]
        archived = [LogPart(base, begin, behind) for base, begin, behind in spans if begin < behind]
        return archived + self._log.parts(start, end)

    async def follow(self, start: int) -> AsyncIterator[tuple[int, Envelope]]:
        latest = self.latest()
        for found in self.envelopes(start, latest):
            yield found
        async for found in self._log.follow(max(start, latest)):
            yield found

    # Who reads both sides waits for the log alone: the archive keeps everything.

    def reader_offsets(self) -> list[ReaderOffset]:
        return self._log.reader_offsets()

    def save_reader_offset(self, name: str, offset: int) -> None:
        self._log.save_reader_offset(name, offset)

    def forget_reader(self, name: str) -> None:
        self._log.forget_reader(name)
