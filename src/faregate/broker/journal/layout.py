"""Where things lie in a journal's folder.

journal.json             the format's version and the journal's id
lock                     held by the one writer
high-water               how far everything is synced; readers go no further
topology.json            queues and topics
snapshot.json            what waited in each queue at some moment; what came later is in the logs
segments/OFFSET.seg      the messages
settled/OFFSET.log       what became of the messages of that segment
spool/NAME.batch         batches from other processes, waiting to be appended
readers/NAME.json        how far named readers have come
quarantine/              what `repair`, or the intake of the spool, took out
"""

import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from faregate.broker.journal.disk import Disk
from faregate.broker.journal.frame import VERSION
from faregate.errors import JournalCorrupt, JournalNotFound, JournalTooNew, NotAJournal
from faregate.ports.topology import Topology

SEGMENT_SUFFIX, SETTLED_SUFFIX, BATCH_SUFFIX = ".seg", ".log", ".batch"


class Meta(msgspec.Struct):
    """What journal.json says."""

    format: str = "faregate-journal"
    version: int = VERSION
    id: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    root: Path

    @property
    def meta(self) -> Path:
        return self.root / "journal.json"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def high_water(self) -> Path:
        return self.root / "high-water"

    @property
    def topology(self) -> Path:
        return self.root / "topology.json"

    @property
    def snapshot(self) -> Path:
        return self.root / "snapshot.json"

    @property
    def segments(self) -> Path:
        return self.root / "segments"

    @property
    def settled(self) -> Path:
        return self.root / "settled"

    @property
    def spool(self) -> Path:
        return self.root / "spool"

    @property
    def readers(self) -> Path:
        return self.root / "readers"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

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

    def place_in_quarantine(self, name: str, disk: Disk) -> Path:
        """A free name there: what was set aside earlier stays."""
        disk.make_folder(self.quarantine)
        taken, number, place = set(disk.list(self.quarantine)), 2, name
        while place in taken:
            place, number = f"{name}.{number}", number + 1
        return self.quarantine / place

    def foreign_files(self, disk: Disk) -> list[Path]:
        """Files that nothing here has put there."""
        ours = {
            self.segments: (SEGMENT_SUFFIX,),
            self.settled: (SETTLED_SUFFIX,),
            self.spool: (BATCH_SUFFIX,),
            self.readers: (".json",),
        }
        return [
            folder / name
            for folder, suffixes in ours.items()
            for name in disk.list(folder)
            if not name.endswith(suffixes) and not name.startswith(".")
        ]


def prepare(layout: Layout, disk: Disk) -> Meta:
    """Make the folders of a journal, or check that what is there is one that this version can read."""
    disk.make_folder(layout.root)
    names = [name for name in disk.list(layout.root) if name != layout.lock.name and not name.startswith(".")]
    if layout.meta.name not in names and set(names) - {layout.topology.name, "segments", "settled", "spool", "readers"}:
        raise NotAJournal(
            f"{layout.root} has files but no {layout.meta.name}, so it is not a journal: choose an empty folder"
        )
    for folder in (layout.segments, layout.settled, layout.spool, layout.readers):
        disk.make_folder(folder)
    if layout.meta.name not in names:
        write_json(layout.topology, disk, Topology())
        disk.replace(layout.meta, msgspec.json.encode(Meta(id=os.urandom(8).hex())))
    return check_meta(layout, disk)


def check_meta(layout: Layout, disk: Disk) -> Meta:
    """What journal.json says, once it is clear that this version can read the journal."""
    if layout.meta.name not in disk.list(layout.root):
        raise JournalNotFound(f"there is no journal in {layout.root}: no {layout.meta.name} there")
    meta: Meta = read_json(layout.meta, disk, Meta)
    if meta.format != Meta().format:
        raise NotAJournal(f"{layout.meta} is of something else: its format is {meta.format!r}")
    if meta.version > VERSION:
        raise JournalTooNew(
            f"{layout.root} is written in version {meta.version} of the format and this Faregate reads up to "
            f"{VERSION}: update Faregate"
        )
    return meta


def read_json(path: Path, disk: Disk, type: Any) -> Any:
    if path.name not in disk.list(path.parent):
        raise JournalCorrupt(f"{path} is missing: restore it from a backup")
    try:
        found = msgspec.json.decode(disk.read(path), type=type)
    except msgspec.MsgspecError as exc:
        raise JournalCorrupt(
            f"{path} cannot be read: {exc}; restore it from a backup, or see 'faregate journal repair'"
        ) from exc
    if getattr(found, "checksum", "") and found.checksum != _checksum(found):
        raise JournalCorrupt(
            f"{path} is damaged: its checksum is wrong; restore it from a backup, or see 'faregate journal repair'"
        )
    return found


def write_json(path: Path, disk: Disk, content: Any) -> None:
    """Replace the file; `content` has a field `checksum`, which is filled in."""
    content.checksum = _checksum(content)
    disk.replace(path, msgspec.json.encode(content))


def _checksum(content: Any) -> str:
    return f"{zlib.crc32(msgspec.json.encode(msgspec.structs.replace(content, checksum=''))):08x}"
