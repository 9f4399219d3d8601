"""A node: a logical service and everything it declares. No I/O; mistakes in a declaration are found here."""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Concatenate, TypeVar, cast, overload

from faregate.codec import BodyReader
from faregate.core.context import Context
from faregate.errors import (
    ConfigurationError,
    HandlerConflict,
    UnknownKey,
    UnknownMessage,
    WrongSignature,
    check_expires,
)
from faregate.ids import SLOTS
from faregate.message import Kind, MessageType, check_name, describe, known
from faregate.node.declaring import Declares, Escalation, F, Middleware, P, R
from faregate.node.every import Missed, Schedule, check_missed, read_times, tick_class
from faregate.node.key import Key, KeySource, read_key, type_key
from faregate.node.kill_switch import DEFAULT_KILL_SWITCH, GivenSwitch, SwitchTripped, chosen_switch
from faregate.node.outgoing import node_name
from faregate.node.policy import (
    DEFAULT_REDELIVER,
    DEFAULT_RETRY,
    ByKey,
    Order,
    Parallel,
    Redeliver,
    Requeue,
    Retry,
    Serial,
    check_count,
)
from faregate.node.provider import Provider, Scope, provided_type, read_hook, read_provider
from faregate.node.rules import FailurePolicies, When, read_policies
from faregate.node.signature import Signature, check_handler, declaring_frame, read_signature
from faregate.node.subscription import ClaimMode, DedupMode, Subscription
from faregate.node.where import Filter
from faregate.ports.dead_letter import DeadLetter
from faregate.units import counted

M = TypeVar("M")
_PARTITIONS = 8


class Node:
    """Declares subscriptions, middlewares, interpreters and resources of one logical service.

    `schema` is SQL that the node's store runs at start. `publishes` are the events that it publishes: if it is the
    only node of a bus to do so, subscriptions to them need no `source=`, and `bus.publish` needs no `node=`.
    `kill_switch` is that of its subscriptions, unless they have one of their own: None is one with defaults, False one
    that no share of failures trips.
    """

    def __init__(
        self,
        name: str,
        *,
        schema: str | None = None,
        publishes: Iterable[type] = (),
        kill_switch: GivenSwitch = None,
    ) -> None:
        self.name = check_name(name, "the node")
        self.kill_switch = chosen_switch(kill_switch, DEFAULT_KILL_SWITCH, f"node {name!r}")
        self.schema = schema
        self.publishes = {found.wire: found for found in map(_declared_event, publishes)}
        """By wire name."""
        self.subscriptions: dict[tuple[str, str | None], Subscription] = {}
        self.schedules: dict[str, Schedule] = {}
        """By name."""
        self.interpreters: dict[type, Signature] = {}
        self.providers: dict[type, Provider] = {}
        self.start_hooks: list[Signature] = []
        self.stop_hooks: list[Signature] = []
        self.middlewares: list[Signature] = []
        self.after_middlewares: list[Signature] = []
        self.outgoing_middlewares: list[Signature] = []
        self.escalations: dict[type, Signature] = {}
        """Who is told of dead letters (`DeadLetter`), and of kill switches that trip (`SwitchTripped`)."""

    def __repr__(self) -> str:
        return f"<node {self.name}: {counted(len(self.subscriptions), 'subscription')}>"

    def on(
        self,
        cls: type[M],
        *,
        source: "str | Node | None" = None,
        key: KeySource | None = None,
        order: Order | None = None,
        prefetch: int | None = None,
        retry: Retry | None = DEFAULT_RETRY,
        redeliver: Redeliver | None = DEFAULT_REDELIVER,
        requeue: Requeue | None = None,
        rules: Sequence[When] = (),
        dedup: DedupMode = "ledger",
        identity: KeySource | None = None,
        claim: ClaimMode | None = None,
        where: str | None = None,
        expires: float | timedelta | None = None,
        partitions: int | None = None,
        kill_switch: GivenSwitch = None,
        name: str | None = None,
    ) -> Declares[M]:
        """Subscribe a handler: to an event from the node `source`, or to a command sent here. `source` may be left out
        for a declared event that one node of the bus is known to publish.

        `key` is a field, a tuple of fields or a function of the message: messages with the same value are handled in
        order; with `order=fg.ByKey(…)` it is the key of the type unless it is given.
        `retry`, `redeliver` and `requeue` are what is done about a failure, in turn, before the message is a dead
        letter; `rules` say otherwise for some errors, the first that fits counts.
        `dedup` is how repetitions are recognised. `identity`, given like `key`, is the business key: a value is
        handled once, whatever message brings it. `claim` says when it is taken: in the "transaction" of the effect, or,
        for effects outside the store, "eager" or "lazy". `where` is a filter on fields and headers, such as
        "total > 100 and header.region = 'north'": what it does not take is settled as filtered. `prefetch` bounds what
        is fetched ahead. `expires` is how many seconds a message may wait for its handler, from when it set out.
        `partitions` is in how many queues a broker keeps what is ordered by the type's key, so that as many processes
        can share it. `kill_switch` stops consuming while what the handler depends on is down; None: the node's, False:
        no share of failures trips it. Raises a `ConfigurationError` that says what to change.
        """
        message_type, source_name = self._message_type(cls, source)
        _check_decodable(message_type)
        here = f"node {self.name!r}, {message_type.wire}"
        by = None if key is None else read_key(key, message_type, "key")
        if by is None and isinstance(order, ByKey):
            by = type_key(message_type.cls)
        business_key = None if identity is None else read_key(identity, message_type, "identity")
        chosen = _check_order(order, by, here)
        parts = _check_partitions(partitions, chosen, by, cls, here)
        if dedup not in ("ledger", "tokens", "off"):
            raise ConfigurationError(f"dedup is 'ledger', 'tokens' or 'off'; got {dedup!r}")
        if claim not in (None, "transaction", "eager", "lazy"):
            raise ConfigurationError(f"claim is 'transaction', 'eager' or 'lazy'; got {claim!r}")
        if claim is not None and identity is None:
            raise ConfigurationError(f"claim={claim!r} needs identity='the field that holds the business key'")
        failures = read_policies(retry, redeliver, requeue, rules, here)
        _check_requeue(failures, chosen, here)
        if prefetch is not None:
            check_count(prefetch, "prefetch")
        seconds = None if expires is None else check_expires(expires)
        filter_ = None if where is None else Filter(where, cls)
        switch = chosen_switch(kill_switch, self.kill_switch, here)
        frame = declaring_frame()

        def declare(function: Callable[Concatenate[M, P], R], /) -> Callable[Concatenate[Any, P], R]:
            what = f"the handler {_name_of(function)!r} of node {self.name!r}"
            handler = read_signature(function, what, 1, frame)
            check_handler(handler, cls, what)
            address = (message_type.wire, source_name)
            if address in self.subscriptions:
                other = self.subscriptions[address]
                raise HandlerConflict(
                    f"node {self.name!r} handles {message_type.wire}"
                    f"{f' from {source_name}' if source_name else ''} already, in {other.name!r}: "
                    "one handler each; do both things in one, or make another node"
                )
            self.subscriptions[address] = Subscription(
                node=self.name,
                name=check_name(name or _name_of(function), f"{what}: its name (set name=)"),
                message_type=message_type,
                source=source_name,
                handler=handler,
                key=by,
                order=chosen,
                prefetch=prefetch,
                failures=failures,
                dedup=dedup,
                business_key=business_key,
                claim=claim or "transaction",
                expires=seconds,
                partitions=parts,
                where=filter_,
                kill_switch=switch,
            )
            return function

        return declare

    def every(
        self,
        when: str | float | timedelta,
        *,
        tz: str = "UTC",
        missed: Missed = "last",
        name: str | None = None,
        retry: Retry | None = DEFAULT_RETRY,
        redeliver: Redeliver | None = DEFAULT_REDELIVER,
        rules: Sequence[When] = (),
        expires: float | timedelta | None = None,
        kill_switch: GivenSwitch = None,
    ) -> Callable[[F], F]:
        """Call a function periodically: by a cron expression of five fields, "0 3 * * *", in the time zone `tz`, or
        every so many seconds. Each tick is called once, however many processes run the node.

        The function is a handler like any other; its message is an `fg.Tick`. `missed` says what becomes of ticks that
        were due while no process ran: "skip" leaves out those that are more than a minute late, "last" makes up for the
        latest, "all" for each of the latest 100. `name` is the function's name unless it is given: under another name
        it is another schedule. The other options are those of `on`.
        """
        what = f"a schedule of node {self.name!r}"
        times, text, zone = read_times(when, tz, what)
        policy = check_missed(missed, what)

        def declare(function: F) -> F:
            chosen = check_name(name or _name_of(function), f"{what}: its name (set name=)")
            if chosen in self.schedules:
                raise HandlerConflict(f"node {self.name!r} has a schedule {chosen!r} already: give one of them a name=")
            cls = tick_class(chosen, self.name)
            self.on(
                cls,
                name=chosen,
                retry=retry,
                redeliver=redeliver,
                rules=rules,
                expires=expires,
                kill_switch=kill_switch,
            )(function)
            self.schedules[chosen] = Schedule(chosen, text, zone, policy, times, cls)
            return function

        return declare

    def interprets(self, cls: type[M]) -> Declares[M]:
        """Register the function that executes an effect of this class: `async def write(effect, ctx)`."""
        if not isinstance(cls, type) or known(cls) is not None:
            raise ConfigurationError(
                f"an effect is an instance of a class that is no message; {cls!r} cannot be interpreted"
            )
        frame = declaring_frame()

        def declare(function: Callable[Concatenate[M, P], R], /) -> Callable[Concatenate[Any, P], R]:
            if cls in self.interpreters:
                raise HandlerConflict(f"node {self.name!r} interprets {cls.__name__} already: one function each")
            what = f"the interpreter {_name_of(function)!r} of node {self.name!r}"
            self.interpreters[cls] = read_signature(function, what, 1, frame)
            return function

        return declare

    @overload
    def provides(self, function: F) -> F: ...
    @overload
    def provides(self, *, scope: Scope) -> Callable[[F], F]: ...
    def provides(self, function: F | None = None, *, scope: Scope = "message") -> F | Callable[[F], F]:
        """Register a function that makes a resource, by the class that it is annotated with: a generator, whose code
        behind the `yield` releases it, or a function that returns it; async or not. `scope` is how long it lives: one
        "message", or the "bus", which makes it when it starts."""
        frame = declaring_frame()

        def declare(function: F) -> F:
            what = f"the provider {_name_of(function)!r} of node {self.name!r}"
            provider = read_provider(function, what, scope, frame)
            cls = provided_type(provider)
            if cls in self.providers:
                raise HandlerConflict(f"node {self.name!r} provides {cls.__name__} already: one provider each")
            self.providers[cls] = provider
            return function

        return declare if function is None else declare(function)

    def on_start(self, function: F) -> F:
        """Register a function that runs when the bus starts: its resources of the bus are there, which it may take, and
        nothing is consumed yet. If it raises, the bus does not start."""
        what = f"the function {_name_of(function)!r} that node {self.name!r} starts with"
        self.start_hooks.append(read_hook(function, what, declaring_frame()))
        return function

    def on_stop(self, function: F) -> F:
        """Register a function that runs when the bus stops: no handler runs any more, and the resources of the bus are
        still there, which it may take. If it raises, that is logged."""
        what = f"the function {_name_of(function)!r} that node {self.name!r} stops with"
        self.stop_hooks.append(read_hook(function, what, declaring_frame()))
        return function

    def escalates(self, function: Escalation) -> Escalation:
        """Register the function that learns of each dead letter of this node, `async def tell(letter)`, or, by
        the annotation `trip: fg.SwitchTripped`, of its kill switches that trip. What it returns is sent; about a dead
        letter with the commit of that."""
        what = f"the function {_name_of(function)!r} that escalates for node {self.name!r}"
        signature = read_signature(function, what, 1, declaring_frame())
        told = signature.first or DeadLetter
        if signature.extra or told not in (DeadLetter, SwitchTripped):
            raise WrongSignature(f"{what} takes one parameter, an fg.DeadLetter or an fg.SwitchTripped")
        if told in self.escalations:
            raise HandlerConflict(f"node {self.name!r} escalates a {told.__name__} already: one function each")
        self.escalations[told] = signature
        return function

    @property
    def users(self) -> list[Signature]:
        """The functions of this node that may take resources; providers, which may too, are not among them."""
        return [
            *(subscription.handler for subscription in self.subscriptions.values()),
            *self.middlewares,
            *self.after_middlewares,
            *self.outgoing_middlewares,
            *self.interpreters.values(),
            *self.start_hooks,
            *self.stop_hooks,
        ]

    def use(self, middleware: Middleware, *, after: bool = False) -> Middleware:
        """Add `async def mw(ctx, call_next)` around the core, or after it, in order of declaration."""
        signature = self._middleware(middleware, declaring_frame(), "middleware")
        (self.after_middlewares if after else self.middlewares).append(signature)
        return middleware

    def use_outgoing(self, middleware: Middleware) -> Middleware:
        """Add `async def mw(out, call_next)` around everything this node publishes or sends; it may take resources."""
        signature = self._middleware(middleware, declaring_frame(), "outgoing middleware")
        if Context in signature.extra:
            raise WrongSignature(
                "an outgoing middleware takes (out, call_next) and resources of the node; the context of the handler "
                "that sends is out.cause"
            )
        self.outgoing_middlewares.append(signature)
        return middleware

    def _middleware(self, function: Callable[..., Any], frame: Any, what: str) -> Signature:
        what = f"the {what} {_name_of(function)!r} of node {self.name!r}"
        signature = read_signature(function, what, 2, frame)
        if signature.shape != "coroutine":
            raise WrongSignature(f"{what} must be an 'async def' function with the parameters (ctx, call_next)")
        return signature

    def _message_type(self, cls: type, source: "str | Node | None") -> tuple[MessageType, str | None]:
        declared = known(cls) if isinstance(cls, type) else None
        kind: Kind = "command" if source is None else "event"
        if declared is not None and declared.declared:
            kind = declared.kind
        message_type = describe(cls, kind)
        if kind == "command" and source is not None:
            raise UnknownMessage(
                f"{message_type.wire} is a command, which may come from any node: subscribe without source="
            )
        return message_type, None if source is None else node_name(source, "the source node")


def _declared_event(cls: type) -> MessageType:
    message_type = describe(cls, "event")
    if not message_type.declared:
        raise UnknownMessage(f"{cls.__name__} is declared nowhere as an event: put @fg.event above it")
    return message_type


def _check_order(order: Order | None, key: Key | None, where: str) -> Order:
    if order is None:
        return Parallel() if key is None else ByKey()
    if not isinstance(order, Serial | Parallel | ByKey):
        raise ConfigurationError(f"{where}: order must be fg.Serial(), fg.Parallel(n) or fg.ByKey(lanes=n)")
    if isinstance(order, ByKey) and key is None:
        raise UnknownKey(f"{where}: order=fg.ByKey() needs key='the field whose values are handled in order'")
    return order


def _check_partitions(given: int | None, order: Order, key: Key | None, cls: type, where: str) -> int | None:
    ordered = isinstance(order, Serial) or (isinstance(order, ByKey) and key is not None)
    if ordered and not isinstance(order, Serial) and key == type_key(cls):
        return _PARTITIONS if given is None else check_count(given, f"{where}: partitions", 1, SLOTS)
    if given is not None:
        raise ConfigurationError(
            f"{where}: partitions= parts messages by the key of their type, which every publisher knows, so it needs "
            f"key= to be that one, class {cls.__name__}(…, key='the field'), and an order that is neither fg.Serial() "
            "nor fg.Parallel()"
        )
    return 1 if ordered else None


def _check_requeue(failures: FailurePolicies, order: Order, where: str) -> None:
    strict = isinstance(order, Serial) or (isinstance(order, ByKey) and order.strict)
    if strict and any(policy.requeue is not None for policy in failures):
        raise ConfigurationError(
            f"{where}: requeue= sends a message behind later ones, which its order forbids: leave out requeue=, or let "
            "later messages pass with order=fg.ByKey(strict=False) or fg.Parallel(n)"
        )


def _check_decodable(message_type: MessageType) -> None:
    try:
        BodyReader(message_type.cls, limit=0)
    except TypeError as exc:
        raise UnknownMessage(f"{message_type.cls.__name__} has a field that cannot be decoded: {exc}") from exc


def _name_of(function: object) -> str:
    return cast(str, getattr(function, "__name__", type(function).__name__))
