"""The style sheet of a report page: light and dark, screen and paper."""

from __future__ import annotations

from typing import Final

# One list per theme, in the order of `_NAMES`. Lines differ in marker and dash too.
_NAMES: Final = (
    *("page", "card", "ink", "soft", "faint", "rule", "goal"),
    *(f"s{i}" for i in range(8)),
    *(
        "queue",
        "prefill-queue",
        "handoff-wait",
        "decode-queue",
        "entry",
        "prefill",
        "transfer",
        "first",
        "decode",
        "relay",
    ),
    *(f"h{i}" for i in range(5)),
    *("hot-ink", "hatch"),
)
_LIGHT: Final = (
    *("#f6f7f9", "#ffffff", "#1b2330", "#566173", "#8a94a6", "#e1e5ec", "#b3261e"),
    *("#1463c4", "#c2500a", "#1f7a3d", "#8b3bb0", "#b0235f", "#0b7f86", "#8a6d00", "#5b6475"),
    *("#f6e3b0", "#f0b95a", "#e8998d", "#c9c46a"),
    *("#9ad0d6", "#3b7ddd", "#b57bd0", "#57b27a", "#2f8a55", "#b9c0cc"),
    *("#e3eefb", "#bcd8f5", "#86b8ea", "#4489d0", "#1658a8"),
    *("#ffffff", "#6b4a00"),
)
_DARK: Final = (
    *("#12161d", "#1a202a", "#e6eaf1", "#a7b1c2", "#77829a", "#2c3543", "#ff8a80"),
    *("#6cb0ff", "#ff9d5c", "#6fd08c", "#d193f0", "#ff86b3", "#4fd0d6", "#e0c050", "#a9b3c6"),
    *("#93814a", "#c08d33", "#b8695e", "#8d8940"),
    *("#5b9aa1", "#4b8be6", "#a56cc4", "#52b57b", "#2f9a5c", "#6a7588"),
    *("#1f3148", "#25466d", "#2d6199", "#4387cf", "#8cc2ff"),
    *("#0c1420", "#3a2500"),
)

_RULES: Final = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 1360px; margin: 0 auto; padding: 28px 24px 48px; }
h1 { font-size: 25px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 34px 0 10px; break-after: avoid; }
h3 { font-size: 16px; margin: 0 0 2px; }
p { margin: 0 0 8px; max-width: 82ch; }
.sub { color: var(--soft); }
.verdict { font-size: 19px; margin: 14px 0 6px; }
.verdict b { border: 2px solid var(--ink); border-radius: 6px; padding: 1px 10px; }
.reading { border-left: 4px solid var(--s0); padding: 2px 0 2px 14px; margin: 14px 0 4px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(215px, 1fr)); gap: 14px;
  margin: 18px 0 0; }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: 12px 16px; }
.tile .what { color: var(--soft); font-size: 13px; }
.tile .value { font-size: 23px; font-weight: 650; line-height: 1.3; }
.tile .note { color: var(--soft); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: 14px 16px 10px; break-inside: avoid; }
figure:last-child:nth-child(odd) { grid-column: 1 / -1; }
figcaption { margin-bottom: 8px; }
figcaption p { color: var(--soft); font-size: 13.5px; margin: 0; }
svg { display: block; width: 100%; max-width: 700px; height: auto; margin: 0 auto; }
svg text { font-size: 12.5px; fill: var(--ink);
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
svg .tick { fill: var(--soft); font-size: 12px; }
svg .strong { fill: var(--ink); }
svg .name { fill: var(--soft); font-size: 12.5px; }
svg .label { font-weight: 600; }
.grid { stroke: var(--rule); stroke-width: 1; }
.axis { stroke: var(--faint); stroke-width: 1; }
.lead { stroke: var(--faint); stroke-width: 0.8; stroke-dasharray: 1 3; }
.goal { stroke: var(--goal); stroke-width: 1.6; stroke-dasharray: 7 4; }
svg .goal-name { fill: var(--goal); font-size: 12px; }
.line { fill: none; stroke-width: 2.4; stroke-linejoin: round; stroke-linecap: round; }
.thin { fill: none; stroke-width: 1.5; stroke-linejoin: round; }
.mark { stroke: var(--card); stroke-width: 1.2; }
.line.rest { stroke: var(--faint); stroke-width: 1; opacity: 0.55; }
.mark.rest { fill: var(--faint); }
.thin.prefill { stroke: var(--s0); }
.thin.decode { stroke: var(--s1); stroke-dasharray: 6 2; }
.thin.mixed { stroke: var(--s2); stroke-dasharray: 2 2; }
.bar.good { fill: var(--s0); }
.bar.short { fill: var(--faint); }
.whole { fill: none; stroke: var(--ink); stroke-width: 1.2; }
.cell { stroke: var(--rule); }
.cell.none { fill: none; stroke-dasharray: 4 3; stroke: var(--faint); }
.cell.below { stroke: var(--goal); stroke-width: 2; }
.torn { stroke: var(--card); stroke-width: 2; fill: none; }
.cell.top { stroke: var(--ink); stroke-width: 2.5; }
svg .in.none { fill: var(--soft); }
svg .in.top { font-weight: 700; }
svg .in.h3, svg .in.h4 { fill: var(--hot-ink); }
.p-queue { fill: var(--queue); }
.p-prefill_queue { fill: var(--prefill-queue); }
.p-handoff_wait { fill: var(--handoff-wait); }
.p-decode_queue { fill: var(--decode-queue); }
.p-recovery { fill: var(--handoff-wait); }
.p-tokenise { fill: var(--entry); }
.p-prefill { fill: var(--prefill); }
.p-transfer { fill: var(--transfer); }
.p-first_step { fill: var(--first); }
.p-decode { fill: var(--decode); }
.p-relay { fill: var(--relay); }
.p-unattributed { fill: var(--rule); stroke: var(--faint); stroke-width: 0.5; }
#hatch path { stroke: var(--hatch); stroke-width: 1; opacity: 0.6; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 13px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 4px 7px; text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom;
  border-bottom: 1px solid var(--faint); }
td { border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child, .left { text-align: left; }
td.left { white-space: normal; }
td.best { font-weight: 700; }
td.best::after { content: " *"; }
td.missed { color: var(--goal); }
tr.first td { border-top: 2px solid var(--faint); }
code { font: 12.5px ui-monospace, "SF Mono", Menlo, "Liberation Mono", monospace;
  overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 16px; margin: 0;
  font-size: 13.5px; }
dt { color: var(--soft); }
dd { margin: 0; }
@media (max-width: 900px) { .charts { grid-template-columns: minmax(0, 1fr); } }
@media print {
  body { font-size: 10.5pt; background: none; }
  main { padding: 0; max-width: none; }
  figure, .tile, .scroll { border-color: #bbb; }
  .scroll { overflow: visible; }
  table { font-size: 7.5pt; }
  th, td { padding: 2px 4px; }
  thead { display: table-header-group; }
  tr { break-inside: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""
_DASHES: Final = ("", "9 3", "3 3", "12 3 3 3", "6 2", "2 4", "14 4", "4 2 1 2")


def style_sheet() -> str:
    """The whole style sheet; dark is for screens alone, so that paper stays white."""
    series = [
        f".line.s{i} {{ stroke: var(--s{i}); stroke-dasharray: {dash or 'none'}; }}\n"
        f".mark.s{i} {{ fill: var(--s{i}); }}\n"
        f"svg .t{i} {{ fill: var(--s{i}); }}"
        for i, dash in enumerate(_DASHES)
    ]
    heat = [f".cell.h{i} {{ fill: var(--h{i}); }}" for i in range(5)]
    light, dark = _theme(_LIGHT), _theme(_DARK)
    return "\n".join(
        [
            f":root {{ color-scheme: light dark; {light} }}",
            f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}",
            _RULES.strip(),
            *series,
            *heat,
        ]
    )


def _theme(colours: tuple[str, ...]) -> str:
    return " ".join(f"--{name}: {c};" for name, c in zip(_NAMES, colours, strict=True))
