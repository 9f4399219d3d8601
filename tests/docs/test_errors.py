"""Every error that a user can meet is exported, and docs/errors.md says what happened and what to do."""

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import faregate as fg

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
WITHIN = {"ClaimLost", "RunStopped", "TransactionEnded"}
"""Caught within Faregate; who meets one all the same meets it as the exported class that it is derived from."""
COMMANDS = ("faregate.cli", "faregate.examples")


def below(cls: type[fg.FaregateError]) -> Iterator[type[fg.FaregateError]]:
    for each in cls.__subclasses__():
        yield each
        yield from below(each)


def tree() -> dict[str, type[fg.FaregateError]]:
    """The errors of all modules, but for the command line's and its examples', which it turns into sentences, and the
    tests'."""
    for module in pkgutil.walk_packages(fg.__path__, "faregate."):
        if not module.name.startswith((*COMMANDS, "faregate.__main__")):
            import_module(module.name)
    own = [each for each in below(fg.FaregateError) if each.__module__.startswith("faregate.")]
    return {each.__name__: each for each in own if not each.__module__.startswith((*COMMANDS, "faregate.testing"))}


def test_every_error_is_exported() -> None:
    found = tree()
    assert len(found) > 40 and found.keys() >= WITHIN
    missing = {name for name, cls in found.items() if getattr(fg, name, None) is not cls} - WITHIN
    assert not missing, f"export them in faregate/__init__.py: {sorted(missing)}"
    assert found.keys() - WITHIN <= set(fg.__all__)


def test_every_error_has_a_row_that_says_what_to_do() -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    names = [row[0].strip(" `") for row in rows]
    branches = {"ConfigurationError", "OutcomeUnknown", "Permanent", "Transient"}
    assert sorted(names) == sorted(tree().keys() - WITHIN - branches)
    assert all(len(row) == 3 and all(cell.strip() for cell in row) for row in rows)
