"""The option `archive`: the log and its archive, read as one log."""

from functools import lru_cache

from faregate.archive.joined import ArchivedLog
from faregate.archive.reading import Archive, open_archive
from faregate.errors import OffsetGone
from faregate.ports.log import LogTransport
from faregate.spark.options import Options
from faregate.spark.source.reading import lose


def with_archive(log: LogTransport, options: Options) -> LogTransport:
    """Raises `NotAnArchive`, `ArchiveUnavailable`."""
    assert options.archive is not None

    def on_loss(loss: OffsetGone) -> None:
        lose(loss, options.fail_on_data_loss)

    return ArchivedLog(log, _opened(options.archive), on_loss, types=options.types, sources=options.nodes)


@lru_cache(maxsize=8)
def _opened(target: str) -> Archive:
    """Once in a process: a stream asks for its log many times a second."""
    return open_archive(target)
