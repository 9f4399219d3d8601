"""A process that a handler forked must not come back into the bus.

It has copies of everything: the open transaction, the sockets, the event loop. Whatever it did with them would happen
twice, or break them for its parent. A child that ends by itself (`multiprocessing`, `subprocess`) is none of our
concern; one that returns from the handler, or awaits what belongs to the bus, is ended at once.
"""

import os
from typing import NoReturn

_generation = 0
_STATUS = 70  # EX_SOFTWARE


def _forked() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_forked)


def generation() -> int:
    """The same for as long as the process is the same."""
    return _generation


def end_if_forked(before: int) -> None:
    """Does not return in a process that was forked since `generation()` gave `before`."""
    if _generation != before:
        _end()


def _end() -> NoReturn:
    text = (
        f"faregate: process {os.getpid()} was forked in a handler and came back into the bus; it is ended, since its "
        "parent goes on with the same message. End it in the handler (os._exit), or use multiprocessing or subprocess\n"
    )
    os.write(2, text.encode())
    os._exit(_STATUS)
