"""Reads the signatures of handlers, middlewares, interpreters and providers once, at declaration."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from faregate.core.context import Context
from faregate.errors import WrongSignature
from faregate.message import known
from faregate.node.outgoing import Reply, bare_command

Shape = Literal["coroutine", "async generator", "function", "generator"]


@dataclass(frozen=True, slots=True)
class Signature:
    """How to call a function: its kind, and what its parameters after the fixed ones get."""

    function: Callable[..., Any]
    shape: Shape
    extra: tuple[type, ...]
    """`Context`, or the type of a provided resource, for each further parameter in order."""
    first: Any
    """The annotation of the first fixed parameter, or None."""
    returns: Any

    @property
    def in_thread(self) -> bool:
        """Plain functions run in a thread, so that blocking code does not hold the event loop."""
        return self.shape in ("function", "generator")

    @property
    def resources(self) -> tuple[type, ...]:
        return tuple(slot for slot in self.extra if slot is not Context)


def read_signature(function: object, what: str, fixed: int, locals_of: FrameType | None) -> Signature:
    """Check that `function` takes `fixed` parameters and then only ones we can fill.

    `locals_of` is the frame that declares it: annotations may name classes that are local there.
    """
    if not callable(function) or isinstance(function, type):
        raise WrongSignature(f"{what} must be a function; got {function!r}")
    hints = _hints(function, locals_of)
    extra: list[type] = []
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise WrongSignature(f"{what} has the parameter {parameter}: use plain positional parameters only")
        names.append(parameter.name)
        if len(names) <= fixed:
            continue
        annotation = hints.get(parameter.name)
        if annotation is Context or (annotation is None and parameter.name == "ctx"):
            extra.append(Context)
        elif isinstance(annotation, type) and annotation is not Any:
            extra.append(annotation)
        else:
            raise WrongSignature(
                f"{what} has the parameter {parameter.name!r} that nothing can fill: annotate it with fg.Context, "
                "or with the type of a resource that the node provides"
            )
    if len(names) < fixed:
        raise WrongSignature(f"{what} takes {len(names)} parameters and must take at least {fixed}")
    first = hints.get(names[0]) if names else None
    return Signature(function, _shape(function), tuple(extra), first, hints.get("return"))


def check_handler(signature: Signature, cls: type, what: str) -> None:
    """The first parameter must accept the message, and the annotated result must not be a bare command."""
    first = signature.first
    if isinstance(first, type) and first is not Any and not issubclass(cls, first):
        raise WrongSignature(
            f"{what} is subscribed to {cls.__name__} but its first parameter is a {first.__name__}: "
            f"annotate it as {cls.__name__}, or subscribe to {first.__name__}"
        )
    for part in _flatten(signature.returns):
        message_type = known(part) if isinstance(part, type) else None
        if message_type is not None and message_type.kind == "command":
            raise bare_command(part)


def returned_types(signature: Signature) -> list[type]:
    """The classes that a handler is annotated to return or yield, wherever they stand in the annotation; without those
    that it answers with."""
    return [part for part in _flatten(signature.returns) if isinstance(part, type)]


def replied_types(signature: Signature) -> list[type]:
    """The classes that a handler is annotated to answer with: `fg.Reply[CardCharged]`."""
    replies = [part for part in _flatten(signature.returns) if get_origin(part) is Reply]
    return [part for reply in replies for part in _flatten(get_args(reply)[0]) if isinstance(part, type)]


def yielded_type(signature: Signature, what: str) -> type:
    """The T of a provider's AsyncIterator[T] or AsyncGenerator[T, None]."""
    arguments = get_args(signature.returns)
    if signature.shape != "async generator" or not arguments or not isinstance(arguments[0], type):
        raise WrongSignature(
            f"{what} must be an async generator annotated with what it yields: "
            "async def session() -> AsyncIterator[Session]: … yield session …"
        )
    provided: type = arguments[0]
    return provided


def declaring_frame() -> FrameType | None:
    """The frame that called the caller, outside of the module in which that is."""
    frame: FrameType | None = sys._getframe(1)
    here = None if frame is None else frame.f_code.co_filename
    while frame is not None and frame.f_code.co_filename == here:
        frame = frame.f_back
    return frame


def _hints(function: Any, frame: FrameType | None) -> dict[str, Any]:
    names = {} if frame is None else {**frame.f_globals, **frame.f_locals}
    plain = function if inspect.isroutine(function) else function.__call__
    try:
        return get_type_hints(plain, localns=names)
    except (NameError, TypeError):
        return {name: hint for name, hint in plain.__annotations__.items() if not isinstance(hint, str)}


def _shape(function: Any) -> Shape:
    plain = function if inspect.isroutine(function) else function.__call__
    if inspect.isasyncgenfunction(plain):
        return "async generator"
    if inspect.iscoroutinefunction(plain):
        return "coroutine"
    return "generator" if inspect.isgeneratorfunction(plain) else "function"


def _flatten(annotation: Any) -> list[Any]:
    """What stands in an annotation, whatever is around it. An answer stays as it is: it is not published."""
    if get_origin(annotation) in (None, Reply):
        return [annotation]
    return [part for argument in get_args(annotation) for part in _flatten(argument)]
