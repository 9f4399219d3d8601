"""What a run found, for people: on the screen, and as a page with charts."""

from pathlib import Path
from typing import Any

from faregate.charts import Series, lines, page, table
from faregate.cli.output import say
from faregate.cli.table import Column, numbers, show_table
from faregate.errors import ConfigurationError
from faregate.plain import plain
from faregate.units import counted

Result = dict[str, Any]
_HEAD = ("", "count", "per s", "p50", "p90", "p99", "p99.9", "max")


def show(result: Result) -> None:
    say(f"{result['message']}: {result['where']}, {_stores(result)}", "bold")
    say(f"{_load(result)}; {result['seconds']:.1f} s measured after {result['warm_up']:g} s of warm-up", "dim")
    show_table([Column(_HEAD[0]), *numbers(*_HEAD[1:])], _rows(result), style="dim")
    for line in _remarks(result):
        say(plain(line), "yellow")


def _rows(result: Result) -> list[tuple[str, ...]]:
    rows = [
        ("publish to confirm", *_cells(result["publish"], result["published_per_second"])),
        ("publish to handled", *_cells(result["end_to_end"], result["handled_per_second"])),
    ]
    if len(result["subscriptions"]) > 1:
        for each in result["subscriptions"]:
            rows.append((plain(f"  {each['type']} at {each['node']}"), *_cells(each, each["per_second"])))
    return rows


def _cells(summary: Result, per_second: float) -> tuple[str, ...]:
    times = (_time(summary[name]) for name in ("p50", "p90", "p99", "p999", "max"))
    return (f"{summary['count']:,}", f"{per_second:,.0f}", *times)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 0.0009995:
        return f"{seconds * 1_000_000:.3g} µs"
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:,.3g} s"


def _load(result: Result) -> str:
    how = "as fast as it goes" if result["rate"] is None else f"{result['rate']:,g} a second asked for"
    many = "" if result["burst"] == 1 else f" in bursts of {result['burst']:,}"
    return f"{counted(result['producers'], 'producer')}{many}, {how}"


def _stores(result: Result) -> str:
    kinds = sorted({url.partition(":")[0] for url in result["stores"]})
    return f"store {', '.join(kinds)}" if kinds else "no store"


def _remarks(result: Result) -> list[str]:
    found = []
    if result["rate"] is not None and result["published_per_second"] < 0.95 * result["rate"]:
        found.append(f"the rate was not reached: {result['published_per_second']:,.0f} a second of {result['rate']:,g}")
    late = result["late"]
    if late and late["p99"] is not None and late["p99"] > 0.1:
        found.append(f"messages were sent late: p99 {_time(late['p99'])}, max {_time(late['max'])} after their turn")
    found += [f"{count:,} could not be published: {text}" for text, count in result["errors"].items()]
    for outcome, count in result["outcomes"].items():
        if outcome != "handled":
            found.append(f"{count:,} {outcome}")
    found += [f"{count:,} alarms: {kind}" for kind, count in result["alarms"].items() if kind != "dead-letter"]
    if result["waiting"]:
        found.append(f"{result['waiting']:,} had not been handled when the waiting ended")
    return found


def check_report(path: Path) -> Path:
    """Raises `ConfigurationError` for a report that could not be written in the end."""
    if path.suffix not in (".html", ".md"):
        raise ConfigurationError(f"--report {path}: a report is called .html or .md")
    if not path.parent.is_dir():
        raise ConfigurationError(f"--report {path}: there is no folder {path.parent}")
    return path


def write(result: Result, path: Path) -> None:
    """One file; for Markdown the charts are files beside it, named in it."""
    title = f"{result['message']}: what the bus carries"
    told = f"{result['where']}, {_stores(result)}. {_load(result)}; {result['seconds']:.1f} s measured."
    charts = _charts(result)
    if path.suffix == ".html":
        remarks = "".join(f"{line}. " for line in _remarks(result)) or "No error, and nothing left over."
        sections = [("Latency and throughput", remarks, table(_HEAD, _rows(result)))]
        path.write_text(page(title, told, [*sections, *charts]), encoding="utf-8")
        return
    parts = [f"# {title}", told, _markdown_table(_rows(result)), *(f"- {line}" for line in _remarks(result))]
    for number, (name, text, drawn) in enumerate(charts, 1):
        beside = path.with_name(f"{path.stem}-{number}.svg")
        beside.write_text(drawn, encoding="utf-8")
        parts.append(f"## {name}\n\n{text}\n\n![{name}]({beside.name})")
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _markdown_table(rows: list[tuple[str, ...]]) -> str:
    lines_of = [_HEAD, ("---", *["---:"] * (len(_HEAD) - 1)), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines_of)


def _charts(result: Result) -> list[tuple[str, str, str]]:
    rows, half = result["over_time"], result["window"] / 2

    def over_time(column: str, factor: float = 1.0) -> list[tuple[float, float]]:
        return [(row["second"] + half, row[column] * factor) for row in rows if row[column] is not None]

    window = f"In windows of {result['window']:g} s."
    found = []
    if rows:
        rates = [Series("published", over_time("published")), Series("handled", over_time("handled"))]
        found.append(("Throughput", window, _drawn(rates, "Throughput", "seconds", "messages / s")))
        times = [
            Series("handled p99", over_time("handled_p99", 1000)),
            Series("handled p50", over_time("handled_p50", 1000)),
            Series("confirmed p99", over_time("published_p99", 1000)),
            Series("confirmed p50", over_time("published_p50", 1000)),
        ]
        name = "Latency over time"
        found.append((name, f"From the call until confirmed, and until handled. {window}", _drawn(times, name)))
    curves = [
        Series("handled", [(percent, took * 1000) for percent, took in result["curves"]["end_to_end"]]),
        Series("confirmed", [(percent, took * 1000) for percent, took in result["curves"]["publish"]]),
    ]
    name = "Latency by share of messages"
    told = "So many percent of the messages took at most that long."
    return [*found, (name, told, _drawn(curves, name, "percent of messages"))]


def _drawn(series: list[Series], title: str, x_name: str = "seconds", y_name: str = "milliseconds") -> str:
    return lines([each for each in series if each.points], title=title, x_name=x_name, y_name=y_name)
