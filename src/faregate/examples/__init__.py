"""The examples that the command line runs. A wheel has them in this folder; in a checkout they are in `examples/`."""

from pathlib import Path

_ABOVE = Path(__file__).parents[2]
if _ABOVE.name == "src":
    __path__.append(str(_ABOVE.with_name("examples")))
