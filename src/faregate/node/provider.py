"""What a node provides to its functions: who makes it, and how long it lives.

message    made for one message, released with it
bus        made once when the bus starts, released when it has stopped; all messages share it
"""

from dataclasses import dataclass
from types import FrameType
from typing import Literal, get_args

from faregate.errors import ConfigurationError, WrongSignature
from faregate.node.signature import Signature, read_signature

Scope = Literal["message", "bus"]
SCOPES: tuple[Scope, ...] = get_args(Scope)


@dataclass(frozen=True, slots=True)
class Provider:
    what: str
    """As errors name it: "the provider 'client' of node 'billing'"."""
    signature: Signature
    scope: Scope


def read_provider(function: object, what: str, scope: Scope, locals_of: FrameType | None) -> Provider:
    """Check a provider. Raises `ConfigurationError` for an unknown scope, and `WrongSignature`."""
    if scope not in SCOPES:
        raise ConfigurationError(f"{what}: scope is 'message' or 'bus'; got {scope!r}")
    signature = read_signature(function, what, 0, locals_of)
    if scope == "bus" and signature.takes_context:
        raise WrongSignature(
            f"{what} takes the context of a message, and makes what outlives every message: leave out ctx, or "
            'scope="bus"'
        )
    return Provider(what, signature, scope)


def provided_type(provider: Provider) -> type:
    """What it provides, by its annotation. Raises `WrongSignature`."""
    signature = provider.signature
    provided = signature.returns
    if signature.shape in ("generator", "async generator"):
        provided = next(iter(get_args(provided)), None)
    if not isinstance(provided, type) or provided is type(None):
        raise WrongSignature(
            f"{provider.what} must be annotated with the class of what it provides: "
            "async def session() -> AsyncIterator[Session]: … yield session …, or def session() -> Session: …"
        )
    return provided


def read_hook(function: object, what: str, locals_of: FrameType | None) -> Signature:
    """Check a function that runs once, when the bus starts or stops. Raises `WrongSignature`."""
    signature = read_signature(function, what, 0, locals_of)
    if signature.takes_context:
        raise WrongSignature(f"{what} takes the context of a message, and runs for none: leave it out")
    if signature.shape not in ("coroutine", "function"):
        raise WrongSignature(
            f"{what} yields, and nobody would take that: return, or make it a resource, which has a beginning and an "
            'end, with @node.provides(scope="bus")'
        )
    return signature
