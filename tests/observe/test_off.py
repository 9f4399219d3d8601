"""Who observes nothing loads nothing and runs what ran before; a missing extra is one sentence."""

import subprocess
import sys

import pytest

import faregate as fg
from faregate.core.observer import Observer

OFF = """
import asyncio, sys
import faregate as fg

class Placed(fg.Event):
    n: int

node = fg.Node("a")

@node.on(Placed, source="a")
async def handle(placed: Placed) -> None:
    pass

async def main():
    async with fg.Bus("memory:", nodes=[node], store="memory:") as bus:
        await bus.publish(Placed(n=1))
        await bus.idle(30)

asyncio.run(main())
loaded = [name for name in sys.modules if name.partition(".")[0] in ("opentelemetry", "prometheus_client")]
print(loaded, [name for name in sys.modules if name.startswith("faregate.observe")])
"""

MISSING = """
import asyncio, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("opentelemetry", "prometheus_client"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import faregate as fg
for name in ("OpenTelemetry", "Prometheus"):
    try:
        getattr(fg.observe, name)
    except fg.MissingExtra as exc:
        print(exc)

async def main():
    async with fg.observe.serve(fg.Bus("memory:", nodes=[fg.Node("a")]), port=0) as served:
        for path in ("live", "metrics"):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(f"GET /{path} HTTP/1.1\\r\\n\\r\\n".encode())
            print((await reader.read()).decode().split("\\r\\n")[0::6])
            writer.close()

asyncio.run(main())
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_bus_that_nobody_observes_loads_nothing_of_it() -> None:
    assert run(OFF) == "[] []\n"


def test_a_missing_extra_is_a_sentence_that_names_it() -> None:
    lines = run(MISSING).splitlines()
    assert lines[0] == (
        "fg.observe.OpenTelemetry needs opentelemetry, which is not installed: pip install 'faregate[otel]'"
    )
    assert lines[1] == (
        "fg.observe.Prometheus needs prometheus_client, which is not installed: pip install 'faregate[prometheus]'"
    )
    assert "200 OK" in lines[2]
    assert "501 Not Implemented" in lines[3] and "pip install 'faregate[prometheus]'" in lines[3]


def test_without_observers_the_pipeline_and_the_ways_out_are_those_without() -> None:
    node = fg.Node("a")

    @node.on(fg.event(type("Placed", (fg.Event,), {})), source="a")
    async def handle(placed: object) -> None:
        pass

    sender = fg.Bus("memory:", nodes=[node], breaker=None)._senders["a"]
    assert sender._hand_over_roots == sender._publish_roots
    assert sender._hand_over_outputs == sender._publish_to_guarded
    assert sender._guarded is sender._transport, "without a breaker nothing is in between"


@pytest.mark.parametrize("given", ["otel", 7, [Observer(), None], Observer], ids=["text", "number", "list", "class"])
def test_what_does_not_observe_is_refused(given: object) -> None:
    with pytest.raises(fg.ConfigurationError, match="observe= takes"):
        fg.Bus("memory:", nodes=[fg.Node("a")], observe=given)  # type: ignore[arg-type]


def test_there_is_no_other_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Jaeger'"):
        fg.observe.Jaeger  # noqa: B018
