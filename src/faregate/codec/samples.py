"""Values that fit a JSON Schema: examples in documents, and load for `faregate bench`.

They are made up: the same seed gives the same values. Of what JSON Schema can say, this knows what msgspec and pydantic
write for ordinary classes; a pattern, or a rule in somebody's code, may refuse a value.
"""

import base64
import random
import string
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from faregate.codec.schema import Schema

_EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
_DEEP = 6
"""Below that optional fields are left out, and arrays empty: a class may have fields of its own kind."""


class Samples:
    def __init__(self, schema: Schema, shared: Mapping[str, Schema], seed: int = 0) -> None:
        """`shared`: what the schema refers to, by the last part of the reference."""
        self._schema, self._shared = schema, shared
        self._random = random.Random(seed)

    def make(self) -> Any:
        """The next value, as JSON has it."""
        return self._value(self._schema, 0, "")

    def _value(self, schema: Any, depth: int, name: str) -> Any:
        if not isinstance(schema, dict):
            return None
        if "$ref" in schema:
            return self._value(self._shared[schema["$ref"].rpartition("/")[2]], depth, name)
        for word in ("const", "enum", "examples"):
            if word in schema:
                return schema[word] if word == "const" else self._random.choice(schema[word])
        for word in ("anyOf", "oneOf", "allOf"):
            if word in schema:
                return self._value(self._chosen(schema[word], depth), depth, name)
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = self._random.choice(kind)
        if kind in ("integer", "number"):
            return self._number(schema, whole=kind == "integer")
        if kind == "string":
            return self._text(schema, name)
        if kind == "boolean":
            return self._random.random() < 0.5
        if kind == "array":
            return self._array(schema, depth, name)
        if kind == "object":
            return self._object(schema, depth)
        return None

    def _chosen(self, choices: list[Schema], depth: int) -> Schema:
        """Something rather than nothing, while it does not go on for ever."""
        nothing = [each for each in choices if each.get("type") == "null"]
        real = [each for each in choices if each.get("type") != "null"]
        return self._random.choice(nothing if nothing and (depth > _DEEP or not real) else real)

    def _number(self, schema: Schema, *, whole: bool) -> float | int:
        step = schema.get("multipleOf", 1 if whole else 0.01)
        least: list[float] = [schema[name] for name in ("minimum", "exclusiveMinimum") if name in schema]
        most: list[float] = [schema[name] for name in ("maximum", "exclusiveMaximum") if name in schema]
        low = max(least, default=min([1, *(bound - 1000 for bound in most)]))
        high = min(most, default=low + 1000)
        low += step if "exclusiveMinimum" in schema else 0
        high -= step if "exclusiveMaximum" in schema else 0
        first, last = -(-low // step), high // step
        value = self._random.randint(int(first), max(int(first), int(last))) * step
        return int(value) if whole else round(float(value), 6)

    def _text(self, schema: Schema, name: str) -> str:
        moment = _EPOCH + timedelta(seconds=self._random.randrange(300 * 86_400))
        digits = "".join(self._random.choices("0123456789abcdef", k=32))
        made = {
            "date-time": moment.isoformat().replace("+00:00", "Z"),
            "date": moment.date().isoformat(),
            "time": moment.time().isoformat() + "Z",
            "duration": f"PT{self._random.randrange(3600)}S",
            "uuid": f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}",
            "decimal": f"{self._random.randrange(100_000) / 100:.2f}",
            "email": f"{digits[:8]}@example.com",
            "uri": f"https://example.com/{digits[:8]}",
        }.get(schema.get("format", ""))
        if made is not None:
            return made
        if schema.get("contentEncoding") == "base64":
            return base64.b64encode(self._random.randbytes(max(12, schema.get("minLength", 0) * 3 // 4))).decode()
        # A text says which field it is, as far as there is room: people read examples.
        made = f"{name or 'text'}-{self._random.randrange(1000)}"
        made += "".join(self._random.choices(string.ascii_lowercase, k=schema.get("minLength", 0) - len(made)))
        return made[-schema["maxLength"] :] if schema.get("maxLength") else made

    def _array(self, schema: Schema, depth: int, name: str) -> list[Any]:
        items = schema.get("items", {})
        if isinstance(items, list):
            return [self._value(each, depth + 1, name) for each in items]
        fewest = schema.get("minItems", 0)
        most = max(fewest, min(schema.get("maxItems", fewest + 2), fewest + 2))
        count = fewest if depth > _DEEP else self._random.randint(max(fewest, min(1, most)), most)
        found: list[Any] = []
        for _ in range(count * 20):
            value = self._value(items, depth + 1, name)
            if not (schema.get("uniqueItems") and value in found):
                found.append(value)
            if len(found) == count:
                break
        return found

    def _object(self, schema: Schema, depth: int) -> dict[str, Any]:
        needed = schema.get("required", [])
        fields = schema.get("properties", {})
        found = {
            name: self._value(each, depth + 1, name)
            for name, each in fields.items()
            if name in needed or (depth <= _DEEP and "default" not in each)
        }
        more = schema.get("additionalProperties")
        if not fields and isinstance(more, dict):
            found |= {f"name-{number}": self._value(more, depth + 1, "value") for number in range(1, 3)}
        return found
