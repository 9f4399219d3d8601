"""`fg.asyncapi` and `faregate asyncapi`: valid by AsyncAPI's own schema, true of the bus, and fit to be given away."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from examples.shop.app import make_bus
from faregate.asyncapi.headers import _TOLD
from faregate.codec import CODECS
from faregate.codec.samples import Samples
from faregate.codec.schema import json_schemas
from faregate.message import REPLY_TO
from faregate.transports.amqp_wire import HEADERS
from tests.cli import contracts
from tests.presence import address, missing

ROOT = Path(__file__).parents[2]
CLASSES = [
    contracts.Everything,
    contracts.Fewer,
    contracts.Made,
    contracts.Seen,
    contracts.DoIt,
    contracts.Done,
    contracts.Grown,
]


def documents() -> dict[str, dict[str, Any]]:
    return {"shop": fg.asyncapi.document(make_bus()), "contracts": fg.asyncapi.document(contracts.bus)}


def validator(schema: Any) -> Any:
    try:
        import jsonschema
    except ModuleNotFoundError:
        missing("jsonschema is not installed: run the tests with ./dev test, which installs it")
    return jsonschema.Draft7Validator(schema)


@pytest.fixture(scope="module")
def official() -> Any:
    """AsyncAPI's own JSON Schema of its documents."""
    return validator(json.loads(Path(address("FAREGATE_TEST_ASYNCAPI")).read_text()))


def faregate(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "faregate", "asyncapi", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "200", **env},
    )


# --- valid --------------------------------------------------------------------------------------------------


@pytest.mark.services
@pytest.mark.parametrize("name", ["shop", "contracts"])
def test_a_document_is_valid_by_the_official_schema(official: Any, name: str) -> None:
    assert [f"{error.json_path}: {error.message}" for error in official.iter_errors(documents()[name])] == []


@pytest.mark.services
def test_the_official_schema_refuses_what_is_wrong(official: Any) -> None:
    document = documents()["contracts"]
    document["operations"]["hub.sends.Made"]["action"] = "shout"
    document["components"]["schemas"]["DoIt"]["properties"]["pet"]["discriminator"] = {"propertyName": "kind"}
    del document["servers"]["bus"]["host"]
    wrong = " ".join(error.json_path for error in official.iter_errors(document))
    assert "hub.sends.Made" in wrong and "DoIt" in wrong and "servers" in wrong


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, each in value.items():
            if name == "$ref":
                yield each
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def at(document: dict[str, Any], ref: str) -> Any:
    found: Any = document
    for part in ref.removeprefix("#/").split("/"):
        found = found[part]
    return found


@pytest.mark.parametrize("name", ["shop", "contracts"])
def test_every_reference_leads_somewhere_and_operations_take_messages_of_their_channel(name: str) -> None:
    document = documents()[name]
    for ref in references(document):
        assert at(document, ref), ref
    for operation in document["operations"].values():
        for message in operation["messages"]:
            assert message["$ref"].startswith(operation["channel"]["$ref"] + "/messages/")


def test_real_messages_fit_the_payload_schemas_and_others_do_not() -> None:
    document = documents()["contracts"]
    components = {"components": document["components"]}
    real = {
        "DoIt": contracts.DoIt(pair=(1, "a"), pet=contracts.Cat(kind="cat"), tags=[contracts.Tag(name="abc")], count=3),
        "Seen": contracts.Seen(name="a", tags=["b"]),
        "Grown": contracts.Grown(more=[contracts.Grown()]),
    }
    for name, message in real.items():
        fits = validator({"$ref": f"#/components/schemas/{name}", **components})
        body = json.loads(CODECS["json"].encoder(type(message))(message))
        assert fits.is_valid(body), list(fits.iter_errors(body))
    fits = validator({"$ref": "#/components/schemas/DoIt", **components})
    body = json.loads(real["DoIt"].model_dump_json())  # type: ignore[attr-defined]
    assert not fits.is_valid({**body, "pair": ["a", 1]})
    assert not fits.is_valid({**body, "count": 4})
    pair = document["components"]["schemas"]["Everything"]["properties"]["pair"]
    assert validator(pair).is_valid([1, "a"]) and not validator(pair).is_valid([1, "a", 2])


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_made_up_messages_can_be_decoded(cls: type) -> None:
    schemas = json_schemas([cls])
    samples, decode = Samples(schemas.of[cls], schemas.shared, seed=1), CODECS["json"].decoder(cls)
    made = [samples.make() for _ in range(100)]
    for each in made:
        decode(json.dumps(each).encode())
    again = Samples(schemas.of[cls], schemas.shared, seed=1)
    assert [again.make() for _ in range(100)] == made


# --- true ---------------------------------------------------------------------------------------------------


def test_operations_are_what_the_nodes_of_the_bus_send_and_handle() -> None:
    document = documents()["shop"]  # of OrderShipped only the annotation of a handler says so
    assert {name: each["channel"]["$ref"] for name, each in document["operations"].items()} == {
        "shop.sends.OrderPlaced": "#/channels/event.shop.OrderPlaced",
        "payments.sends.CardCharged": "#/channels/event.payments.CardCharged",
        "shipping.sends.OrderShipped": "#/channels/event.shipping.OrderShipped",
        "billing.receives.OrderPlaced.from.shop": "#/channels/event.shop.OrderPlaced",
        "payments.receives.charge-card": "#/channels/command.payments.charge-card",
        "shipping.receives.CardCharged.from.payments": "#/channels/event.payments.CardCharged",
    }
    assert document["operations"]["billing.receives.OrderPlaced.from.shop"]["x-faregate"]["key"] == ["customer"]
    assert document["components"]["messages"]["OrderPlaced"]["x-faregate"] == {"kind": "event", "key": ["customer"]}


def test_a_node_that_runs_elsewhere_has_no_operations_here() -> None:
    document = documents()["contracts"]
    assert "event.elsewhere.Grown" in document["channels"]
    assert {each["x-faregate"]["node"] for each in document["operations"].values()} == {"hub", "worker", "other"}


def test_a_recipient_with_fewer_fields_has_a_message_of_its_own_in_the_channel() -> None:
    document = documents()["contracts"]
    messages = document["channels"]["event.hub.Everything"]["messages"]
    assert list(messages) == ["Everything", "Everything.tests.cli.contracts.Fewer"]
    taken = document["operations"]["other.receives.Everything.from.hub"]["messages"][0]["$ref"]
    assert taken.endswith("/Everything.tests.cli.contracts.Fewer")
    assert document["components"]["messages"]["Everything.tests.cli.contracts.Fewer"]["name"] == "Everything"


def test_an_event_and_a_command_may_have_one_wire_name() -> None:
    class Tell(fg.Event, wire="tell"):
        text: str

    class Ask(fg.Command, wire="tell"):
        number: int

    node = fg.Node("talk")
    node.on(Tell, source="talk")(_take)
    node.on(Ask)(_take)
    messages = fg.asyncapi.document(fg.Bus("memory:", nodes=[node]))["components"]["messages"]
    assert {name: each["title"] for name, each in messages.items()} == {"tell.event": "Tell", "tell": "Ask"}


def _take(message: Any) -> None: ...


def test_what_a_handler_is_annotated_to_answer_with_is_its_reply() -> None:
    document = documents()["contracts"]
    reply = document["operations"]["worker.receives.do-it"]["reply"]
    assert at(document, reply["channel"]["$ref"])["address"] is None
    assert reply["address"] == {"location": f"$message.header#/{REPLY_TO}"}
    shown = [at(document, at(document, each["$ref"])["$ref"])["title"] for each in reply["messages"]]
    assert shown == ["Done", "Seen"]
    assert "worker.sends.Done" not in document["operations"], "an answer is not published"
    assert [name for name, each in document["operations"].items() if "reply" in each] == ["worker.receives.do-it"]
    assert 'Answers with <a href="#message-Done">' in fg.asyncapi.page(document)


def test_a_command_is_no_bare_one_as_an_answer() -> None:
    class Next(fg.Command):
        number: int

    node = fg.Node("talk")

    @node.on(contracts.Done, source="talk")
    async def answer(event: contracts.Done) -> AsyncIterator[fg.Reply[Next] | contracts.Seen]:
        yield fg.reply(Next(number=1))

    document = fg.asyncapi.document(fg.Bus("memory:", nodes=[node]))
    operation = document["operations"]["talk.receives.Done.from.talk"]
    assert operation["reply"]["messages"] == [{"$ref": "#/channels/replies/messages/Next"}]
    assert "talk.sends.Seen" in document["operations"]


def test_a_filter_and_several_keys_are_shown() -> None:
    document = documents()["contracts"]
    told = document["operations"]["other.receives.Seen.from.worker"]["x-faregate"]
    assert (told["key"], told["where"]) == ([["name"], ["tags"]], "name <> 'nobody'")
    assert "where name &lt;&gt; &#x27;nobody&#x27;; in order of name, and of tags" in fg.asyncapi.page(document)


def test_on_rabbitmq_channels_are_routing_keys_of_the_exchange() -> None:
    channel = documents()["contracts"]["channels"]["event.hub.Made"]
    assert channel["address"] == "event.hub.Made.{slot}"
    assert "slot" in channel["parameters"]
    assert channel["bindings"]["amqp"]["exchange"]["name"] == "faregate"


def test_every_header_that_travels_is_described() -> None:
    fields = {field for field, _ in HEADERS.values()}
    assert fields - _TOLD.keys() == set(), "say in asyncapi/headers.py what it is"
    described = documents()["shop"]["components"]["schemas"]["faregate-headers"]["properties"].keys()
    assert described == {*HEADERS, REPLY_TO}


# --- fit to be given away -----------------------------------------------------------------------------------


def test_nothing_secret_is_in_a_document() -> None:
    text = json.dumps(documents()["contracts"])
    for secret in ("s3cret", "zoe7", "ca.pem", "***", "confirm=5s"):
        assert secret not in text
    server = documents()["contracts"]["servers"]["bus"]
    assert (server["host"], server["protocol"], server["pathname"]) == (
        "one.example,two.example:5673",
        "amqps",
        "/shop",
    )


def test_no_path_of_this_machine_is_in_a_document(tmp_path: Path) -> None:
    document = fg.asyncapi.document(make_bus(tmp_path))
    assert document["servers"]["bus"]["protocol"] == "journal"
    assert str(tmp_path) not in json.dumps(document)


def test_the_page_is_whole_and_escapes_what_it_shows() -> None:
    document = documents()["contracts"]
    html = fg.asyncapi.page(document)
    assert "<script" not in html and "http" not in html and "<b>even" not in html
    assert "All there is, &lt;b&gt;even&lt;/b&gt; this." in html
    for name in [*document["components"]["messages"], "hub", "worker", "other"]:
        assert f'-{name}"' in html, name
    assert fg.asyncapi.page(json.loads(json.dumps(document))) == html


def test_a_bus_without_messages_has_a_document_and_a_page() -> None:
    document = fg.asyncapi.document(fg.Bus("memory:", nodes=[fg.Node("alone")]))
    assert document["channels"] == {} and "alone" in fg.asyncapi.page(document)


@pytest.mark.parametrize(("option", "value"), [("title", ""), ("version", ""), ("version", 3)])
def test_a_title_or_version_that_is_no_text_is_refused(option: str, value: Any) -> None:
    with pytest.raises(fg.ConfigurationError, match=f"{option} must be a text"):
        fg.asyncapi.document(make_bus(), **{option: value})


# --- the command --------------------------------------------------------------------------------------------


def test_the_command_prints_the_same_document_in_every_process() -> None:
    one, two = (faregate("tests.cli.contracts:bus", PYTHONHASHSEED=seed) for seed in ("1", "2"))
    assert one.returncode == 0, one.stderr
    assert one.stdout == two.stdout
    assert json.loads(one.stdout) == documents()["contracts"]


def test_the_command_writes_a_document_and_a_page(tmp_path: Path) -> None:
    document, html = tmp_path / "api.json", tmp_path / "api.html"
    options = ("-o", str(document), "--html", str(html), "--title", "The shop", "--api-version", "2.1")
    shown = faregate("examples.shop.app:bus", *options)
    assert (shown.returncode, shown.stdout) == (0, "")
    assert json.loads(document.read_text())["info"]["version"] == "2.1"
    assert "<h1>The shop</h1>" in html.read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere:bus"], "there is no module 'nowhere'"),
        (["examples.shop.app:bus", "-o", "/nowhere/api.json"], "/nowhere/api.json cannot be written: No such file"),
        (["examples.shop.app:bus", "--api-version", ""], "version must be a text"),
    ],
)
def test_a_mistake_is_one_clear_sentence(arguments: list[str], told: str) -> None:
    shown = faregate(*arguments)
    assert shown.returncode == 1
    assert told in shown.stderr
    assert "Traceback" not in shown.stderr


def test_the_page_of_the_docs_shows_parts_of_the_real_document() -> None:
    text = (ROOT / "docs/asyncapi.md").read_text()
    shown = [json.loads(block.partition("```")[0]) for block in text.split("```json\n")[1:]]
    assert shown
    document = fg.asyncapi.document(make_bus())
    for part in shown:
        assert _is_part(part, document), json.dumps(part)


def _is_part(part: Any, whole: Any) -> bool:
    if not isinstance(part, dict):
        return bool(part == whole)
    return isinstance(whole, dict) and all(name in whole and _is_part(part[name], whole[name]) for name in part)
