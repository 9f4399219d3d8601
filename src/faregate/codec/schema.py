"""JSON Schemas of message classes, in the dialect that AsyncAPI 3 documents have (draft 7).

msgspec describes structs, dataclasses and attrs classes, pydantic its own models; both write a later draft. What
readers of draft 7 would misread is written as they know it: the places of a tuple, and discriminators.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import msgspec

from faregate.codec.formats import is_pydantic

Schema = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Schemas:
    of: dict[type, Schema]
    """For each class its schema: mostly a reference to one of `shared`."""
    shared: dict[str, Schema]
    """By the name that references to it have."""


def json_schemas(classes: Iterable[type], ref_template: str = "#/$defs/{name}") -> Schemas:
    """The schemas of these classes, which share what they refer to; `ref_template` says where they look for it."""
    every = list(dict.fromkeys(classes))
    plain = [cls for cls in every if not is_pydantic(cls)]
    models = [cls for cls in every if is_pydantic(cls)]
    found, shared = msgspec.json.schema_components(plain, schema_hook=_unknown, ref_template=ref_template)
    of = dict(zip(plain, found, strict=True))
    names = {ref_template.format(name=name): schema for name, schema in shared.items()}
    for cls, info in zip(plain, msgspec.inspect.multi_type_info(plain), strict=True):
        _tell_moments(info, of[cls], names, set())
    # Each model by itself, as pydantic's functions for several would have to be imported. One may be called as
    # something else is: then it gets its module's name, too.
    for cls in models:
        name = cls.__name__ if cls.__name__ not in shared else f"{cls.__module__}.{cls.__name__}"
        schema = cls.model_json_schema(ref_template=ref_template.replace("{name}", "{model}"))  # type: ignore[attr-defined]
        inner = schema.pop("$defs", {})
        renamed = {each: each if shared.get(each, inner[each]) == inner[each] else f"{name}.{each}" for each in inner}
        refs = {ref_template.format(name=old): ref_template.format(name=new) for old, new in renamed.items()}
        shared |= {renamed[each]: _with_refs(inner[each], refs) for each in inner}
        if "$ref" in schema:  # it has fields of its own kind, so it is one of the inner ones
            of[cls] = _with_refs(schema, refs)
        else:
            shared[name] = _with_refs(schema, refs)
            of[cls] = {"$ref": ref_template.format(name=name)}
    return Schemas(
        {cls: _draft_7(of[cls]) for cls in every}, {name: _draft_7(schema) for name, schema in shared.items()}
    )


def _tell_moments(info: Any, schema: Schema, names: dict[str, Schema], seen: set[str]) -> None:
    """Add an example to moments that may lack a zone. msgspec calls them texts, without a word: they fit no format of
    JSON Schema."""
    if "$ref" in schema:
        if schema["$ref"] in seen:
            return
        seen.add(schema["$ref"])
        schema = names[schema["$ref"]]
    if isinstance(info, msgspec.inspect.DateTimeType | msgspec.inspect.TimeType):
        if info.tz is not True:
            moment = "2026-11-17T10:00:00Z" if isinstance(info, msgspec.inspect.DateTimeType) else "10:00:00"
            schema["examples"] = [moment.removesuffix("Z") if info.tz is False else moment]
    elif isinstance(info, msgspec.inspect.UnionType):
        for each in info.types:
            named = getattr(getattr(each, "cls", None), "__name__", None)
            fits = [
                part
                for part in schema.get("anyOf", [])
                if (part == {"type": "string"} if hasattr(each, "tz") else part.get("$ref", "").endswith(f"/{named}"))
            ]
            for part in fits[:1]:
                _tell_moments(each, part, names, seen)
    elif fields := getattr(info, "fields", None):
        for field in fields:
            _tell_moments(field.type, schema.get("properties", {}).get(field.encode_name, {}), names, seen)
    elif items := getattr(info, "item_type", None):
        _tell_moments(items, schema.get("items", {}), names, seen)
    elif items := getattr(info, "item_types", None):
        for each, place in zip(items, schema.get("prefixItems", []), strict=True):
            _tell_moments(each, place, names, seen)
    elif values := getattr(info, "value_type", None):
        _tell_moments(values, schema.get("additionalProperties", {}), names, seen)


def _unknown(cls: type) -> Schema:
    """A field that only somebody's own codec can read."""
    return {"title": cls.__name__}


def _with_refs(value: Any, refs: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [_with_refs(each, refs) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: refs.get(each, each) if name == "$ref" and isinstance(each, str) else _with_refs(each, refs)
        for name, each in value.items()
    }


_DATA = ("default", "const", "enum", "examples")
"""What stands below these is no schema."""
_BY_NAME = ("properties", "patternProperties", "$defs")
"""Below these there are schemas by any name."""


def _draft_7(value: Any) -> Any:
    if isinstance(value, list):
        return [_draft_7(each) for each in value]
    if not isinstance(value, dict):
        return value
    found: Schema = {}
    for name, each in value.items():
        if name in _DATA:
            found[name] = each
        elif name in _BY_NAME:
            found[name] = {key: _draft_7(schema) for key, schema in each.items()}
        elif name == "discriminator" and isinstance(each, dict):
            found[name] = each["propertyName"]
        elif name == "items" and "prefixItems" in value:
            found["additionalItems"] = _draft_7(each)
        else:
            found["items" if name == "prefixItems" else name] = _draft_7(each)
    return found
