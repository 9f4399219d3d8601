"""Where a run of `faregate journal archive` can die: around everything that it leaves behind, and within a rename.

    before meta 1 · within meta 1 · after meta 1 · before reader 1 · … · before file 2 · … · after manifest 1 · …

`stop_at` counts them, and calls `die` at one of them.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from faregate.archive.layout import META, OWN
from faregate.broker.journal import archive
from faregate.broker.journal.reader import JournalReader


class Patches(Protocol):
    """As pytest's `monkeypatch`."""

    def setattr(self, target: Any, name: str, value: Any) -> None: ...


class Plain:
    """In a process of its own nothing has to be undone."""

    def setattr(self, target: Any, name: str, value: Any) -> None:
        setattr(target, name, value)


def stop_at(place: str, die: Callable[[], None], patches: Patches) -> list[str]:
    """Returns the places that the run came to; all of them, when `place` is none."""
    seen: list[str] = []
    counted: Counter[str] = Counter()
    inside: list[str] = []
    put, save, rename = archive.put, JournalReader.save_reader_offset, Path.rename

    def come_to(moment: str) -> None:
        seen.append(f"{moment} {inside[-1]}")
        if seen[-1] == place:
            die()

    def around(kind: str, act: Callable[..., Any], *arguments: Any) -> Any:
        counted[kind] += 1
        inside.append(f"{kind} {counted[kind]}")
        come_to("before")
        done = act(*arguments)
        come_to("after")
        inside.pop()
        return done

    def counted_put(target: Any, name: str, data: bytes) -> None:
        kind = "meta" if name == META else "manifest" if name.startswith(OWN) else "file"
        around(kind, put, target, name, data)

    def counted_rename(path: Path, target: Path) -> Path:
        if inside:
            come_to("within")
        return rename(path, target)

    patches.setattr(archive, "put", counted_put)
    patches.setattr(JournalReader, "save_reader_offset", lambda self, *given: around("reader", save, self, *given))
    patches.setattr(Path, "rename", counted_rename)
    return seen
