"""Tables of a catalog: `CREATE TABLE t USING faregate OPTIONS (…)`.

Spark hands the options of a table to a source in Python once, when the table is created, and never again: what a query
brings is the table's schema. So the options are kept there, as metadata of the first column. (decision 51)

Rules kept here:
- Of what Spark sends when a table is created, the options are those behind `option.`, and `path`. The rest is Spark's
  own (`owner`, `provider`, `location`, …) or the user's table properties.
- Only reading goes by what was kept. A row that is read from one table and inserted into another brings the metadata
  of the first along: a write that went by it would go back to where the row came from.
- No password is kept: the schema goes wherever rows of the table go.
"""

import json
from collections.abc import Mapping

from pyspark.sql.types import StructField, StructType

from faregate.errors import InvalidOption
from faregate.spark.options import FOR_WRITING, PLACES, Options, shown

_PREFIX = "option."
_KEPT = "faregate.options"


def is_creation(options: Mapping[str, str]) -> bool:
    """Whether this is what Spark sends when a table is created."""
    return options.get("provider", "").lower() == "faregate" and "owner" in options


def given_for_table(options: Mapping[str, str]) -> dict[str, str]:
    """What the user said behind OPTIONS, or LOCATION."""
    found = {name[len(_PREFIX) :]: value for name, value in options.items() if name.startswith(_PREFIX)}
    if "path" in options:
        # Spark makes an address of a folder, without quoting what has to be quoted in one.
        found["path"] = options["path"].removeprefix("file:")
    return found


def keep(schema: StructType, options: Options, given: Mapping[str, str]) -> StructType:
    """The schema of a table that is created. Raises `InvalidOption` for what a table cannot have."""
    options.refuse(FOR_WRITING, "is for writing, and a table is read; INSERT INTO goes through a temporary view")
    for place in options.places:
        if shown(place) != str(place):
            raise InvalidOption(
                f"{shown(place)} has a password, which everybody who reads the table could see: use CREATE "
                "TEMPORARY VIEW … USING faregate OPTIONS …"
            )
    kept = {name: value for name, value in given.items() if name.lower() not in PLACES}
    kept["paths"] = json.dumps([str(place) for place in options.places])
    first, *others = schema.fields
    return StructType([StructField(first.name, first.dataType, first.nullable, {_KEPT: json.dumps(kept)}), *others])


def kept_in(schema: StructType) -> dict[str, str]:
    """The options of the table that has this schema; none when it is no table's."""
    found = [field.metadata[_KEPT] for field in schema.fields if _KEPT in field.metadata]
    return dict(json.loads(found[0])) if found else {}
