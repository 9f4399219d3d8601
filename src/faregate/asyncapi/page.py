"""An AsyncAPI document as one HTML page for people: who sends what to whom, and what is in it.

Rules kept here:
- The page is made of the document alone, so it shows what others get, and serves any document that `document` made.
- Nothing comes from the network and there is no script. Readable on a light and on a dark screen, and in print.
- Names and texts come from somebody's code: all of them are escaped.
"""

import json
from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

Json = dict[str, Any]

_STYLE = """
:root { color-scheme: light dark; --back: #f6f7f9; --card: #ffffff; --text: #1c2330; --faint: #5d6675; --line: #e0e5ec;
  --code: #eef1f5; --event: #0b62c4; --command: #b45309; }
@media (prefers-color-scheme: dark) { :root { --back: #12161d; --card: #1a2029; --text: #e8ebf0; --faint: #a3adbb;
  --line: #2d3541; --code: #232b36; --event: #62a8ff; --command: #fbbf5c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.55 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 10px; }
h3 { font-size: 16px; margin: 0 0 2px; } h4 { font-size: 13px; margin: 14px 0 4px; color: var(--faint); }
p { margin: 0 0 8px; color: var(--faint); max-width: 78ch; }
a { color: inherit; text-decoration-color: var(--line); text-underline-offset: 3px; }
article { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 20px;
  overflow-x: auto; break-inside: avoid; }
article + article { margin-top: 14px; }
.nodes { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 14px; }
.nodes article { margin: 0; } ul { margin: 0; padding: 0; list-style: none; } li { padding: 2px 0; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); }
.fields { table-layout: fixed; } .fields th { width: 24%; } .fields th:last-child { width: auto; }
th { color: var(--faint); font-weight: 600; font-size: 13px; } tr:last-child td { border-bottom: 0; }
code, pre { font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; } td code { white-space: nowrap; }
pre { background: var(--code); border-radius: 8px; padding: 10px 14px; margin: 4px 0 0; overflow-x: auto; }
.kind { font-size: 12px; font-weight: 600; border: 1px solid currentColor; border-radius: 9px; padding: 0 7px;
  white-space: nowrap; }
.event { color: var(--event); } .command { color: var(--command); }
.faint, i { color: var(--faint); font-style: normal; }
summary { cursor: pointer; color: var(--faint); }
""".strip()


def page(document: Json) -> str:
    """The page. Takes what `document` returns, also when it was read back from a file."""
    view = _View(document)
    info, title = document["info"], escape(document["info"]["title"])
    server = document["servers"]["bus"]
    where = f"{server['protocol']} on {server['host']}{server.get('pathname', '')}"
    told = f"Version {info['version']} · {where} · {document['defaultContentType']}"
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><main><h1>{title}</h1><p>{escape(told)}</p>",
        f"<h2>Who sends what to whom</h2><article>{view.ways()}</article>",
        f'<h2>Nodes</h2><div class="nodes">{"".join(view.nodes())}</div>',
        f"<h2>Messages</h2>{''.join(view.messages())}",
        f"<h2>Headers</h2><article>{view.headers()}</article>",
        "</main></body></html>\n",
    ]
    return "\n".join(parts)


class _View:
    def __init__(self, document: Json) -> None:
        self._document = document
        self._operations: list[Json] = list(document["operations"].values())

    def _at(self, ref: str) -> Any:
        found: Any = self._document
        for part in ref.removeprefix("#/").split("/"):
            found = found[part]
        return found

    def _doing(self, action: str, channel: str | None = None, node: str | None = None) -> Iterator[Json]:
        for each in self._operations:
            here = channel is None or each["channel"]["$ref"] == f"#/channels/{channel}"
            if each["action"] == action and here and (node is None or each["x-faregate"]["node"] == node):
                yield each

    def ways(self) -> str:
        rows = []
        for name, channel in self._document["channels"].items():
            if channel["address"] is None:  # of replies: they are shown with the handlers that answer
                continue
            kind, address, _ = name.split(".", 2)
            recipients = [
                f"{_node(each['x-faregate']['node'])} <i>in</i> <code>{escape(each['title'])}</code>"
                for each in self._doing("receive", name)
            ]
            sender = _node(address) if kind == "event" else "<span class='faint'>any node</span>"
            links = " ".join(_link(each) for each in channel["messages"])
            told = "<br>".join(recipients) or "<span class='faint'>nobody here</span>"
            rows.append((f"{links} {_kind(kind)}", sender, told, f"<code>{escape(channel['address'])}</code>"))
        return _table(("message", "from", "to", "address"), rows)

    def nodes(self) -> Iterator[str]:
        for name in [each["name"] for each in self._document["info"]["tags"]]:
            parts = [f'<article id="node-{escape(name)}"><h3>{escape(name)}</h3>']
            for action, told in (("receive", "handles"), ("send", "publishes")):
                items = [self._item(each) for each in self._doing(action, node=name)]
                if items:
                    parts.append(f"<h4>{told}</h4><ul>{''.join(items)}</ul>")
            yield "".join([*parts, "</article>"])

    def _item(self, operation: Json) -> str:
        link = _link(operation["messages"][0]["$ref"].rpartition("/")[2])
        told = operation["x-faregate"]
        if operation["action"] == "send":
            return f"<li>{link}</li>"
        order = told["order"]
        how = {"Serial": "one at a time", "Parallel": f"up to {order.get('lanes')} at a time"}.get(order["kind"])
        how = how or f"in order of {_key(told['key'])}, up to {order['lanes']} keys at a time"
        facts = [how, f"recognises repetitions by {told['dedup']}" if told["dedup"] != "off" else "no deduplication"]
        facts.append(f"{told['retry']['times']} retries at once")
        if "where" in told:
            facts.insert(0, f"where {told['where']}")
        if told["redeliver"]:
            facts.append(f"again after {', '.join(f'{each:g}' for each in told['redeliver'])} s")
        about = f"<br>{escape(operation['description'])}" if "description" in operation else ""
        where = f"in <code>{escape(operation['title'])}</code>"
        replies = [_link(each["$ref"].rpartition("/")[2]) for each in operation.get("reply", {}).get("messages", [])]
        answers = f" Answers with {' or '.join(replies)}." if replies else ""
        return f"<li>{link} <span class='faint'>{where}: {escape('; '.join(facts))}.{answers}{about}</span></li>"

    def messages(self) -> Iterator[str]:
        for name, message in self._document["components"]["messages"].items():
            told = message["x-faregate"]
            title = "" if message["title"] == name else f" <span class='faint'>{escape(message['title'])}</span>"
            about = f"<p>{escape(message['description'])}</p>" if "description" in message else ""
            key = f"<p>Its key is {escape(_key(told['key']))}.</p>" if told["key"] else ""
            example = json.dumps(message["examples"][0]["payload"], indent=2, ensure_ascii=False)
            schema = message["payload"]
            parts = [
                f'<article id="message-{escape(name)}"><h3>{escape(name)} {_kind(told["kind"])}{title}</h3>',
                about + key,
                self._fields(schema),
                *self._inner(schema),
                f"<h4>made-up example</h4><pre>{escape(example)}</pre></article>",
            ]
            yield "".join(parts)

    def headers(self) -> str:
        message = next(iter(self._document["components"]["messages"].values()), None)
        schema = self._at(message["headers"]["$ref"]) if message else {}
        rows = [
            (f"<code>{escape(name)}</code>", escape(each["type"]), escape(each["description"]))
            for name, each in schema.get("properties", {}).items()
        ]
        about = f"<p>{escape(schema.get('description', ''))}</p>"
        table = _table(("header", "type", ""), rows, kind="fields")
        return f"{about}<details><summary>{len(rows)} headers</summary>{table}</details>"

    def _fields(self, schema: Json) -> str:
        found = self._at(schema["$ref"]) if "$ref" in schema else schema
        if not found.get("properties"):
            return f"<p>{escape(self._type(found))}</p>"
        needed = found.get("required", [])
        rows = [
            (
                f"<code>{escape(name)}</code>",
                escape(self._type(each)),
                escape(_rules(each, needed=name in needed)),
            )
            for name, each in found["properties"].items()
        ]
        return _table(("field", "type", ""), rows, kind="fields")

    def _inner(self, schema: Json) -> Iterator[str]:
        """The schemas that this one refers to, each once."""
        seen = {schema.get("$ref")}
        waiting = list(_refs(self._at(schema["$ref"]) if "$ref" in schema else schema))
        while waiting:
            ref = waiting.pop(0)
            if ref not in seen:
                seen.add(ref)
                yield f"<h4>{escape(ref.rpartition('/')[2])}</h4>{self._fields({'$ref': ref})}"
                waiting += _refs(self._at(ref))

    def _type(self, schema: Any) -> str:
        if not isinstance(schema, dict):
            return "nothing"
        if "$ref" in schema:
            return str(schema["$ref"].rpartition("/")[2])
        if "const" in schema or "enum" in schema:
            return " or ".join(json.dumps(each) for each in schema.get("enum", [schema.get("const")]))
        for word in ("anyOf", "oneOf", "allOf"):
            if word in schema:
                return (" and " if word == "allOf" else " or ").join(self._type(each) for each in schema[word])
        kind = schema.get("type", "anything")
        if kind == "array":
            items = schema.get("items", {})
            many = isinstance(items, list)
            return f"[{', '.join(map(self._type, items))}]" if many else f"list of {self._type(items)}"
        if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
            return f"{self._type(schema['additionalProperties'])} by name"
        kinds = " or ".join(kind) if isinstance(kind, list) else kind
        return f"{kinds} ({schema['format']})" if "format" in schema else kinds


_BOUNDS = (
    ("minimum", "at least"),
    ("exclusiveMinimum", "more than"),
    ("maximum", "at most"),
    ("exclusiveMaximum", "less than"),
    ("multipleOf", "a multiple of"),
    ("minLength", "length at least"),
    ("maxLength", "length at most"),
    ("minItems", "items at least"),
    ("maxItems", "items at most"),
    ("pattern", "like"),
)


def _rules(schema: Json, *, needed: bool) -> str:
    found = [] if needed else ["optional"]
    if "default" in schema:
        found = [f"optional, {json.dumps(schema['default'])} unless given"]
    bounds = () if isinstance(schema.get("items"), list) else _BOUNDS
    found += [f"{word} {schema[name]}" for name, word in bounds if name in schema]
    return "; ".join([*found, *([schema["description"]] if "description" in schema else [])])


def _refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for each in value.values():
            yield from _refs(each)
    elif isinstance(value, list):
        for each in value:
            yield from _refs(each)


def _key(key: Any) -> str:
    """A field, or a function; several fields together; or several keys."""
    if isinstance(key, str):
        return key
    several = any(isinstance(each, list) for each in key)
    return (", and of " if several else " and ").join(_key(each) for each in key)


def _kind(kind: str) -> str:
    return f'<span class="kind {escape(kind)}">{escape(kind)}</span>'


def _link(message: str) -> str:
    return f'<a href="#message-{escape(message)}"><b>{escape(message)}</b></a>'


def _node(name: str) -> str:
    return f'<a href="#node-{escape(name)}">{escape(name)}</a>'


def _table(head: Iterable[str], rows: Iterable[Iterable[str]], kind: str = "ways") -> str:
    """The cells are HTML already."""
    lines = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return (
        f"<table class='{kind}'><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>{''.join(lines)}</table>"
    )
