"""The demo's report: one HTML file that needs nothing else, in light and in dark."""

import time
from collections.abc import Sequence
from html import escape
from typing import Any

from .charts import Series, bars, lines
from .result import Result
from .timeline import PERCENTS
from .view import cell

_STYLE = """
:root { --paper:#fbfbf9; --card:#fff; --ink:#1c1f24; --soft:#666d78; --grid:#e6e6e1; --alarm:#c92a2a; --good:#1b7f4b;
  --s1:#1f6fd0; --s2:#8a8f99; --s3:#b7791f; --p50:#7fb2ee; --p95:#2f7bd6; --p99:#123f80; color-scheme:light dark }
@media (prefers-color-scheme: dark) { :root { --paper:#14161a; --card:#1c1f25; --ink:#e8eaee; --soft:#9aa2af;
  --grid:#2d323b; --alarm:#ff6b6b; --good:#4cc38a; --s1:#5aa2f5; --s2:#7c8592; --s3:#e0a84a; --p50:#3f6da6;
  --p95:#5aa2f5; --p99:#b9d8ff } }
* { box-sizing:border-box }
body { margin:0; background:var(--paper); color:var(--ink); font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
  "DejaVu Sans",sans-serif }
main { max-width:960px; margin:0 auto; padding:40px 24px 64px }
h1 { font-size:26px; line-height:1.25; margin:0 0 6px; letter-spacing:-.01em }
h2 { font-size:16px; margin:0 0 2px } p { margin:0 0 10px; color:var(--soft) }
.pill { display:inline-block; padding:2px 12px; border-radius:99px; font-weight:600; color:var(--card);
  background:var(--good) } .pill.alarm { background:var(--alarm) }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(116px,1fr)); gap:12px; margin:24px 0 }
.tile,section { background:var(--card); border:1px solid var(--grid); border-radius:12px }
.tile { padding:12px 16px } .tile b { display:block; font-size:22px; font-weight:650; letter-spacing:-.01em }
.tile span { color:var(--soft); font-size:13px } section { padding:20px 22px; margin:16px 0; overflow-x:auto }
svg { width:100%; height:auto; display:block; min-width:560px } svg text { font-size:12px; fill:var(--soft) }
svg .grid { stroke:var(--grid) } svg polyline { fill:none; stroke-width:2; stroke-linejoin:round }
svg .series { font-weight:600; font-size:13px } svg .name,svg .value { fill:var(--ink); font-size:13px }
svg .kill line { stroke:var(--alarm); stroke-dasharray:3 3 } svg .kill text { fill:var(--alarm); font-weight:700 }
svg .tip { fill:transparent } svg .tip:hover { fill:var(--ink); opacity:.06 }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums }
th { text-align:left; font-weight:600; color:var(--soft); font-size:13px } td,th { padding:5px 14px 5px 0;
  border-bottom:1px solid var(--grid) } tr:last-child td { border-bottom:0 } .number { text-align:right }
.held { color:var(--good); font-weight:600 } .broken { color:var(--alarm); font-weight:700 }
footer { color:var(--soft); font-size:13px; margin-top:28px } code { font-size:13px }
"""


def render(result: Result) -> str:
    """The whole page."""
    plan, progress, timeline = result.plan, result.progress, result.timeline
    held = "held" if result.held else "broken"
    told = "Every order was billed, charged and shipped exactly once" if result.held else "The audit did not hold"
    latency = ", ".join(f"p{p} {t:.2f} s" for p, t in zip(PERCENTS, timeline.overall, strict=False)) or "none"
    tiles = [
        (f"{plan.orders:,}", "orders"),
        (f"{plan.copies:,}", "exact copies"),
        (f"{plan.dead:,}", "bad orders"),
        (f"{len(progress.kills)}", "kills by SIGKILL"),
        (f"{progress.timeouts:,}", "silences of the bank"),
        (f"{timeline.messages:,}", "messages in the log"),
        (f"{progress.seconds:.0f} s", "until all was at rest"),
    ]
    shipped, placed = timeline.steps["shipped"], timeline.steps["placed"]
    colours = ("var(--p50)", "var(--p95)", "var(--p99)")
    latencies = [
        Series(f"p{percent}", [None if found is None else found[index] for found in timeline.latencies], colours[index])
        for index, percent in enumerate(PERCENTS)
    ]
    sections = [
        _section(
            "Orders a second",
            f"Published in batches, also while something was down. ✕ marks a kill ({len(progress.kills)}).",
            lines(
                [Series("published", placed, "var(--s2)"), Series("shipped", shipped, "var(--s1)", is_area=True)],
                title="Orders published and shipped in each second",
                kills=progress.kills,
            ),
        ),
        _section(
            "How long orders took",
            f"From published to shipped, by the second of shipping; overall {latency}. "
            "An order that waits for what was killed takes as long as that needs.",
            lines(latencies, title="Latency percentiles", unit=" s", kills=progress.kills, digits=2),
        ),
        _section(
            "Dead letters by reason",
            "Dead letters, kept with their error; <code>faregate dead</code> lists and replays them.",
            bars(sorted(result.dead.items(), key=lambda row: -row[1]), title="Dead letters by reason"),
        ),
        _section(
            "The verdict", "Expected follows from the seed alone; found is counted in the data.", _verdict(result)
        ),
        _section(
            f"The audit, by {escape(result.judge)}",
            escape(str(result.audit_summary)),
            _table(result.audit_table) + _findings(result.findings),
        ),
    ]
    for title, rows in result.spark_tables.items():
        sections.append(_section(escape(title[0].upper() + title[1:]), "Computed by Spark from the log.", _table(rows)))
    pill = f'<span class="pill {"" if result.held else "alarm"}">{held}</span>'
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(progress.began))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Faregate demo: {held}</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>{told}</h1><p>{pill}&ensp;{plan.orders:,} orders through four services. Killed with SIGKILL: "
        f"{escape(result.killed)}. {made}.</p>"
        f'<div class="tiles">{"".join(_tile(*tile) for tile in tiles)}</div>{"".join(sections)}'
        f"<footer>Again, with the same orders: <code>faregate demo{result.options} --orders {plan.orders} "
        f"--crashes {progress.crashes} --seed {plan.seed}</code>. Handlers may run more than once; their effects are "
        "there once.</footer>"
        "</main></body></html>\n"
    )


def _tile(value: str, name: str) -> str:
    return f'<div class="tile"><b>{value}</b><span>{name}</span></div>'


def _section(title: str, told: str, content: str) -> str:
    return f"<section><h2>{title}</h2><p>{told}</p>{content}</section>"


def _verdict(result: Result) -> str:
    rows = "".join(
        f'<tr><td>{escape(check.what)}</td><td class="number">{check.expected:,}</td>'
        f'<td class="number">{check.found:,}</td>'
        f'<td class="number {"held" if check.held else "broken"}">{"held" if check.held else "BROKEN"}</td></tr>'
        for check in result.checks
    )
    head = '<tr><th>checked</th><th class="number">expected</th><th class="number">found</th><th></th></tr>'
    return f"<table>{head}{rows}</table>"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return "<p>Nothing.</p>"
    texts = {name for name in rows[0] if all(isinstance(row[name], str | None) for row in rows)}

    def tagged(tag: str, name: str, value: Any) -> str:
        return f"<{tag}{'' if name in texts else ' class=number'}>{escape(cell(value))}</{tag}>"

    head = "".join(tagged("th", name, name) for name in rows[0])
    body = "".join(f"<tr>{''.join(tagged('td', name, row[name]) for name in rows[0])}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _findings(findings: Sequence[dict[str, Any]]) -> str:
    return f"<p class=broken>What is wrong</p>{_table(findings)}" if findings else ""
