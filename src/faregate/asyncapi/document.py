"""The AsyncAPI 3 document of a bus: what its nodes send and handle, as far as they declare it. Nothing is opened.

Rules kept here:
- A channel is a topic: `event.SOURCE.TYPE`, `command.NODE.TYPE`. What AsyncAPI has no word for is in `x-faregate`.
- A node sends an event when it says so (`publishes=`), when a subscription names it as the `source=`, or when a handler
  is annotated to return it. Who sends a command is declared nowhere: commands have only the operation that receives.
- What a handler is annotated to answer with is the `reply` of its operation. Addresses of replies are those of
  processes, so all replies are in one channel without an address.
- Operations are those of the nodes on this bus. Other nodes show in the addresses alone.
- A wire name that several classes stand for has a message for each: a recipient may declare fewer fields.
- No password, user or query of a URL gets into a document, and no path of this machine: it is for others to read.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from faregate.asyncapi.headers import headers_schema
from faregate.asyncapi.server import server_of
from faregate.bus.bus import Bus
from faregate.codec.samples import Samples
from faregate.codec.schema import Schemas, json_schemas
from faregate.errors import ConfigurationError
from faregate.ids import SLOTS
from faregate.message import REPLY_TO, Kind, MessageType, describe, describe_either, known
from faregate.node.key import Key
from faregate.node.node import Node
from faregate.node.policy import ByKey
from faregate.node.signature import replied_types, returned_types
from faregate.node.subscription import Subscription

ASYNCAPI = "3.0.0"
_EXCHANGE = "faregate"
_HEADERS = "faregate-headers"
_REPLIES = "replies"
Json = dict[str, Any]


@dataclass(frozen=True)
class _Topic:
    kind: Kind
    address: str
    """The node that publishes the event, or that the command goes to."""
    wire: str

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.address}.{self.wire}"


def document(bus: Bus, *, title: str | None = None, version: str = "1.0.0") -> Json:
    """The document, made of what JSON has. `title` and `version` are those of your application.

    Raises `ConfigurationError`.
    """
    for given, name in ((title, "title"), (version, "version")):
        if given is not None and (not isinstance(given, str) or not given):
            raise ConfigurationError(f"{name} must be a text; got {given!r}")
    return _Document(bus).made(title or ", ".join(bus.nodes), version)


class _Document:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._topics: dict[_Topic, dict[type, str]] = {}
        """For each topic the classes that stand for its messages, and what each is called."""
        for topic, message_type, _ in [*_sent(bus), *_received(bus)]:
            self._topics.setdefault(topic, {}).setdefault(message_type.cls, "")
        self._replies: dict[type, str] = {}
        """The classes that handlers answer with, and what each is called."""
        answers = {cls: describe_either(cls) for *_, sub in _received(bus) for cls in replied_types(sub.handler)}
        named_so: list[_Topic | MessageType] = [*self._topics, *answers.values()]
        self._commands = {each.wire for each in named_so if each.kind == "command"}
        types: dict[tuple[Kind, str], dict[type, str]] = {}
        for topic, classes in self._topics.items():
            named = types.setdefault((topic.kind, topic.wire), {})
            for cls in classes:
                classes[cls] = named.setdefault(cls, self._name(topic, cls, len(named)))
        for cls, answer in answers.items():
            named = types.setdefault((answer.kind, answer.wire), {})
            self._replies[cls] = named.setdefault(cls, self._name(answer, cls, len(named)))
        self._messages = {
            name: describe(cls, kind) for (kind, _), named in types.items() for cls, name in named.items()
        }
        classes_of = [message_type.cls for message_type in self._messages.values()]
        self._schemas: Schemas = json_schemas(classes_of, "#/components/schemas/{name}")

    def _name(self, of: _Topic | MessageType, cls: type, taken: int) -> str:
        """The wire name; behind it, for a further class, whose it is."""
        name = f"{of.wire}.event" if of.kind == "event" and of.wire in self._commands else of.wire
        return name if not taken else f"{name}.{cls.__module__}.{cls.__qualname__}".replace("<locals>", "local")

    def made(self, title: str, version: str) -> Json:
        server, security = server_of(self._bus.url)
        operations = {}
        for topic, message_type, node in _sent(self._bus):
            operations[f"{node}.sends.{topic.wire}"] = self._operation("send", topic, message_type, node)
        for topic, message_type, subscription in _received(self._bus):
            name = f"{subscription.node}.receives.{topic.wire}"
            name = f"{name}.from.{topic.address}" if topic.kind == "event" else name
            made = self._operation("receive", topic, message_type, subscription.node)
            operations[name] = made | _handling(subscription) | self._reply(subscription)
        channels = {topic.name: self._channel(topic) for topic in self._topics}
        if self._replies:
            channels[_REPLIES] = self._reply_channel()
        return {
            "asyncapi": ASYNCAPI,
            "info": {"title": title, "version": version, "tags": [{"name": name} for name in self._bus.nodes]},
            "defaultContentType": self._bus.content_type,
            "servers": {"bus": server},
            "channels": channels,
            "operations": operations,
            "components": {
                "messages": {name: self._message(each) for name, each in self._messages.items()},
                "schemas": {**self._schemas.shared, _HEADERS: headers_schema()},
                "correlationIds": {
                    "conversation": {
                        "description": "The root of what a message belongs to: on RabbitMQ its property correlation_id",
                        "location": "$message.header#/correlation_id",
                    }
                },
            }
            | ({"securitySchemes": security} if security else {}),
        }

    def _channel(self, topic: _Topic) -> Json:
        """On RabbitMQ a routing key has the slot of the message's key behind it."""
        told = f"{topic.wire}, published by {topic.address}"
        channel: Json = {
            "address": topic.name,
            "description": told if topic.kind == "event" else f"{topic.wire}, sent to {topic.address}",
            "servers": [{"$ref": "#/servers/bus"}],
            "messages": _messages(self._topics[topic].values()),
        }
        if self._on_rabbitmq:
            channel["address"] = f"{topic.name}.{{slot}}"
            channel["parameters"] = {
                "slot": {"description": f"The slot of the message's key, 0 to {SLOTS - 1}, or - without one"}
            }
            exchange = {"name": _EXCHANGE, "type": "topic", "durable": True, "autoDelete": False}
            channel["bindings"] = {"amqp": {"is": "routingKey", "exchange": exchange, "bindingVersion": "0.3.0"}}
        return channel

    def _reply_channel(self) -> Json:
        return {
            "address": None,
            "description": "Replies, each to the process that asked",
            "servers": [{"$ref": "#/servers/bus"}],
            "messages": _messages(self._replies.values()),
        }

    def _reply(self, subscription: Subscription) -> Json:
        names = [self._replies[cls] for cls in replied_types(subscription.handler)]
        if not names:
            return {}
        channel = f"#/channels/{_REPLIES}"
        return {
            "reply": {
                "address": {"location": f"$message.header#/{REPLY_TO}"},
                "channel": {"$ref": channel},
                "messages": [{"$ref": f"{channel}/messages/{name}"} for name in dict.fromkeys(names)],
            }
        }

    @property
    def _on_rabbitmq(self) -> bool:
        return self._bus.url.startswith(("amqp:", "amqps:"))

    def _operation(self, action: str, topic: _Topic, message_type: MessageType, node: str) -> Json:
        channel = f"#/channels/{topic.name}"
        return {
            "action": action,
            "channel": {"$ref": channel},
            "messages": [{"$ref": f"{channel}/messages/{self._topics[topic][message_type.cls]}"}],
            "tags": [{"name": node}],
            "x-faregate": {"node": node},
        }

    def _message(self, message_type: MessageType) -> Json:
        cls = message_type.cls
        payload = self._schemas.of[cls]
        made: Json = {
            "name": message_type.wire,
            "title": cls.__name__,
            "contentType": self._bus.content_type,
            "headers": {"$ref": f"#/components/schemas/{_HEADERS}"},
            "payload": payload,
            "correlationId": {"$ref": "#/components/correlationIds/conversation"},
            "tags": [{"name": message_type.kind}],
            "examples": [{"payload": Samples(payload, self._schemas.shared).make()}],
            "x-faregate": {"kind": message_type.kind, "key": list(message_type.key)},
        }
        if doc := _first_paragraph(cls.__dict__.get("__doc__"), unlike=f"{cls.__name__}("):
            made["description"] = doc
        if self._on_rabbitmq:
            made["bindings"] = {"amqp": {"messageType": message_type.wire, "bindingVersion": "0.3.0"}}
        return made


def _messages(names: Iterable[str]) -> Json:
    return {name: {"$ref": f"#/components/messages/{name}"} for name in names}


def _sent(bus: Bus) -> Iterator[tuple[_Topic, MessageType, str]]:
    """What nodes of this bus are known to publish, each once: topic, type, node."""
    seen: set[_Topic] = set()
    for node in bus.nodes.values():
        for message_type in _publications(node, bus):
            topic = _Topic("event", node.name, message_type.wire)
            if topic not in seen:
                seen.add(topic)
                yield topic, message_type, node.name


def _publications(node: Node, bus: Bus) -> Iterator[MessageType]:
    yield from node.publishes.values()
    for subscription in node.subscriptions.values():
        for cls in returned_types(subscription.handler):
            found = known(cls)
            if found is not None and found.kind == "event":
                yield found
    for other in bus.nodes.values():
        for subscription in other.subscriptions.values():
            if subscription.source == node.name:
                yield subscription.message_type


def _received(bus: Bus) -> Iterator[tuple[_Topic, MessageType, Subscription]]:
    for node in bus.nodes.values():
        for subscription in node.subscriptions.values():
            message_type = subscription.message_type
            address = subscription.source if message_type.kind == "event" else node.name
            assert address is not None  # a bus has found it out
            yield _Topic(message_type.kind, address, message_type.wire), message_type, subscription


def _handling(subscription: Subscription) -> Json:
    key, order = subscription.key, subscription.order
    retry, redeliver, requeue, _ = subscription.failures.default
    told: Json = {
        "node": subscription.node,
        "handler": subscription.name,
        "order": {"kind": type(order).__name__, **asdict(order)},
        "dedup": subscription.dedup,
        "retry": {"times": retry.times, "delay": retry.delay},
        "redeliver": list(redeliver.delays),
    }
    if requeue is not None:
        told["requeue"] = asdict(requeue)
    if key is not None:
        told["key"] = _key(key)
    if isinstance(order, ByKey):
        told["partitions"] = subscription.partitions
    if subscription.where is not None:
        told["where"] = subscription.where.text
    if subscription.expires is not None:
        told["expires"] = subscription.expires
    found: Json = {"title": subscription.name, "x-faregate": told}
    if doc := _first_paragraph(subscription.handler.function.__doc__):
        found["description"] = doc
    return found


def _key(key: Key) -> Any:
    """Its fields, or the name of a function; of several keys a list of these."""
    return [_key(each) for each in key.each] if key.each else key.function or list(key.fields)


def _first_paragraph(doc: object, unlike: str = "\0") -> str | None:
    """The beginning of a docstring; dataclasses are given one that says nothing."""
    if not isinstance(doc, str) or not doc.strip() or doc.startswith(unlike):
        return None
    return " ".join(doc.strip().split("\n\n")[0].split())


__all__ = ["document"]
