"""Where things lie in a journal's folder.

journal.json             the format's version and the journal's id
lock                     held by the one writer
high-water               how far everything is synced; readers go no further
topology.json            queues and topics
snapshot.json            what waited in each queue at some moment; what came later is in the logs
segments/OFFSET.seg      the messages
settled/OFFSET.log       what became of the messages of that segment
spool/NAME.batch         batches from other processes, waiting to be appended
spool/NAME.*.frames      what the batch of that name is made of, if it does not hold it itself
readers/NAME.json        how far named readers have come
sinks/QUERY.json         which batches of a query on Spark are committed
quarantine/              what `repair`, or the intake of the spool, took out
control/                 the control socket of the bus that runs (`bus/control_place.py`)
"""

import os
import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from faregate.broker.journal.checksum import crc32
from faregate.broker.journal.disk import Disk, size_of
from faregate.broker.journal.frame import VERSION
from faregate.errors import JournalCorrupt, JournalNotFound, JournalTooNew, NotAJournal
from faregate.ports.topology import Topology

T = TypeVar("T")
_PART = re.compile(r"[A-Za-z0-9-]{1,100}\.frames")
SEGMENT_SUFFIX, SETTLED_SUFFIX, BATCH_SUFFIX, PART_SUFFIX = ".seg", ".log", ".batch", ".frames"


class Meta(msgspec.Struct):
    """What journal.json says."""

    format: str = "faregate-journal"
    version: int = VERSION
    id: str = ""


class Layout:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.meta = root / "journal.json"
        self.lock = root / "lock"
        self.high_water = root / "high-water"
        self.topology = root / "topology.json"
        self.snapshot = root / "snapshot.json"
        self.segments = root / "segments"
        self.settled = root / "settled"
        self.spool = root / "spool"
        self.readers = root / "readers"
        self.sinks = root / "sinks"
        self.quarantine = root / "quarantine"
        self.folders = {
            self.segments: SEGMENT_SUFFIX,
            self.settled: SETTLED_SUFFIX,
            self.spool: BATCH_SUFFIX,
            self.readers: ".json",
        }
        """What every journal has, with the suffix of the files in it."""

    def segment(self, base: int) -> Path:
        return self.segments / f"{base:020d}{SEGMENT_SUFFIX}"

    def settled_log(self, base: int) -> Path:
        return self.settled / f"{base:020d}{SETTLED_SUFFIX}"

    def segment_bases(self, disk: Disk) -> list[int]:
        """The base offsets of the segments there are; files of other names are not ours."""
        return sorted(
            int(stem)
            for stem, suffix in map(os.path.splitext, disk.list(self.segments))
            if suffix == SEGMENT_SUFFIX and len(stem) == 20 and stem.isdecimal()
        )

    def bytes(self, disk: Disk) -> int:
        """Of the segments, the side logs and the spool, as far as they stay while they are looked at."""
        folders = (self.segments, self.settled, self.spool)
        return sum(size_of(folder / name, disk) for folder in folders for name in disk.list(folder))

    def place_in_quarantine(self, name: str, disk: Disk) -> Path:
        """A free name there: what was set aside earlier stays."""
        disk.make_folder(self.quarantine)
        taken, number, place = set(disk.list(self.quarantine)), 2, name
        while place in taken:
            place, number = f"{name}.{number}", number + 1
        return self.quarantine / place

    def set_aside(self, path: Path, disk: Disk) -> Path:
        """Move a file to quarantine, behind what belongs to it; returns where it is."""
        for each in (*self.parts(path, disk), path):
            place = self.place_in_quarantine(each.name, disk)
            disk.rename(each, place)
        return place

    def parts(self, path: Path, disk: Disk) -> list[Path]:
        """Files that were made for this batch of the spool: those that it names, and those of drivers who died."""
        if path.parent != self.spool:
            return []
        return [self.spool / name for name in disk.list(self.spool) if is_part(name, path.name)]

    def files(self, folder: Path, disk: Disk) -> list[Path]:
        """The journal's own files in one of its folders, by name. One that starts with a dot is in the making."""
        return [path for path in _visible(folder, disk) if path.name.endswith(self.folders[folder])]

    def foreign_files(self, disk: Disk) -> list[Path]:
        """Files that nothing here has put there."""
        return [
            path
            for folder, suffix in self.folders.items()
            for path in _visible(folder, disk)
            if not path.name.endswith((suffix, PART_SUFFIX) if folder == self.spool else suffix)
        ]


def is_part(name: str, batch: str) -> bool:
    """Whether a file of that name in the spool is made for the batch of that name."""
    stem = f"{batch.removesuffix(BATCH_SUFFIX)}."
    return name.startswith(stem) and _PART.fullmatch(name, len(stem)) is not None


def _visible(folder: Path, disk: Disk) -> list[Path]:
    return [folder / name for name in disk.list(folder) if not name.startswith(".")]


def prepare(layout: Layout, disk: Disk) -> Meta:
    """Make the folders of a journal, or check that what is there is one that this version can read."""
    disk.make_folder(layout.root)
    names = [name for name in disk.list(layout.root) if name != layout.lock.name and not name.startswith(".")]
    begun = {layout.topology.name, *(folder.name for folder in layout.folders)}
    if layout.meta.name not in names and set(names) - begun:
        raise NotAJournal(
            f"{layout.root} has files but no {layout.meta.name}, so it is not a journal: choose an empty folder"
        )
    for folder in layout.folders:
        disk.make_folder(folder)
    if layout.meta.name not in names:
        write_json(layout.topology, disk, Topology())
        disk.replace(layout.meta, msgspec.json.encode(Meta(id=os.urandom(8).hex())))
    return check_meta(layout, disk)


def raise_version(layout: Layout, disk: Disk, meta: Meta) -> Meta:
    """Durable before anything of this version is written: an older program would take it for damage. For who holds the
    journal's lock."""
    if meta.version < VERSION:
        meta = msgspec.structs.replace(meta, version=VERSION)
        disk.replace(layout.meta, msgspec.json.encode(meta))
    return meta


def check_meta(layout: Layout, disk: Disk) -> Meta:
    """What journal.json says, once it is clear that this version can read the journal."""
    if layout.meta.name not in disk.list(layout.root):
        raise JournalNotFound(f"there is no journal in {layout.root}: no {layout.meta.name} there")
    meta = read_json(layout.meta, disk, Meta)
    if meta.format != Meta().format:
        raise NotAJournal(f"{layout.meta} is of something else: its format is {meta.format!r}")
    if meta.version > VERSION:
        raise JournalTooNew(
            f"{layout.root} is written in version {meta.version} of the format and this Faregate reads up to "
            f"{VERSION}: update Faregate"
        )
    return meta


def read_json(path: Path, disk: Disk, type: type[T]) -> T:
    """Raises `JournalCorrupt`."""
    found = find_json(path, disk, type)
    if found is None:
        raise JournalCorrupt(f"{path} is missing: restore it from a backup")
    return found


def find_json(path: Path, disk: Disk, type: type[T]) -> T | None:
    """None when there is no such file."""
    if path.name not in disk.list(path.parent):
        return None
    try:
        data = disk.read(path)
        found = msgspec.json.decode(data, type=type)
        checksum = getattr(found, "checksum", "")
        # Of the bytes that are there: another version may write more fields, or fewer.
        if checksum and checksum != _checksum(data.replace(_told(checksum), _told(""))):
            raise ValueError("its checksum is wrong")
    except (msgspec.MsgspecError, ValueError) as exc:
        raise JournalCorrupt(
            f"{path} cannot be read: {exc}; restore it from a backup, or see 'faregate journal repair'"
        ) from exc
    return found


def write_json(path: Path, disk: Disk, content: Any) -> None:
    """Replace the file; `content` has a field `checksum`, which is filled in."""
    content.checksum = _checksum(msgspec.json.encode(msgspec.structs.replace(content, checksum="")))
    disk.replace(path, msgspec.json.encode(content))


def _checksum(data: bytes) -> str:
    return f"{crc32(data):08x}"


def _told(checksum: str) -> bytes:
    return b'"checksum":"%s"' % checksum.encode()
