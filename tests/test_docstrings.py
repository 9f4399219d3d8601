"""Everything public says what it is: each name of `faregate` and of its public modules, and each method of a class."""

import dataclasses
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import faregate as fg

MODULES = [fg, *(each for each in (getattr(fg, name) for name in fg.__all__) if isinstance(each, ModuleType))]


def public_names(module: ModuleType) -> list[str]:
    """A module without `__all__` offers what it defines itself."""
    names: list[str] = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__
    ]
    return [name for name in names if not name.startswith("_")]


def own_docstring(value: Any) -> str | None:
    """Not one that is inherited, or that `dataclass` made of the fields."""
    doc: str | None = vars(value).get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)
    if doc and dataclasses.is_dataclass(value) and doc.startswith(f"{getattr(value, '__name__', '')}("):
        return None
    return doc


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    """With those of bases that are ours, and not public themselves."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == "faregate":
            for name, value in vars(base).items():
                function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if not name.startswith("_") and inspect.isfunction(function):
                    yield name, function


def lacking(module: ModuleType) -> Iterator[str]:
    for name in public_names(module):
        value = getattr(module, name)
        speaks = isinstance(value, ModuleType) or inspect.isclass(value) or inspect.isroutine(value)
        if speaks and not own_docstring(value):
            yield name
        if inspect.isclass(value):
            # What overrides a method that says what it does, does that.
            yield from (f"{name}.{each}" for each, function in methods(value) if not _documented(value, each, function))


def _documented(cls: type, name: str, function: Any) -> bool:
    return bool(function.__doc__) or any(getattr(vars(base).get(name), "__doc__", None) for base in cls.__mro__)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_everything_public_says_what_it_is(module: ModuleType) -> None:
    assert sorted(set(lacking(module))) == []


def test_what_says_nothing_is_found() -> None:
    class Base:
        def told(self) -> None:
            """Says it."""

    class Silent(Base):
        def told(self) -> None: ...
        def untold(self) -> None: ...

    Base.__module__ = Silent.__module__ = "faregate.sample"
    module = ModuleType("faregate.sample")
    module.__all__ = ["Silent"]  # type: ignore[attr-defined]
    module.Silent = Silent  # type: ignore[attr-defined]
    assert list(lacking(module)) == ["Silent", "Silent.untold"]
