"""How the page looks: one set of rules, two sets of colours."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1b2430; --soft: #5b6675; --line: #e1e5ea;
  --grid: #e8ebef; --mark: #1b2430; --code: #f1f3f6;
  --fed: #1d8a5f; --borderline: #b97a00; --starved: #cf4a35; --plain: #3b6fd4;
  --c1: #3b6fd4; --c2: #d9712b; --c3: #1d8a5f; --c4: #a24fc0; --c5: #b98a00; --c6: #0f8f9c;
  --c7: #c43d6b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1a2028; --ink: #e6eaf0; --soft: #9aa6b5; --line: #2a323d;
    --grid: #28303a; --mark: #e6eaf0; --code: #11161c;
    --fed: #3fbf8a; --borderline: #e0a83a; --starved: #ef7a64; --plain: #7aa2f0;
    --c1: #7aa2f0; --c2: #f09a5c; --c3: #3fbf8a; --c4: #cc8be3; --c5: #e0bd4a; --c6: #4cc3cf;
    --c7: #f07fa3;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 48px; }
.brand { margin: 0; color: var(--soft); font-size: 14px; letter-spacing: .02em; }
h1 { margin: 2px 0 14px; font-size: clamp(22px, 4.4vw, 32px); line-height: 1.2;
  text-wrap: balance; }
h2 { margin: 0 0 12px; font-size: 20px; }
h3 { margin: 0 0 4px; font-size: 16px; }
dl { margin: 0; display: grid; gap: 4px 24px; }
dl div { display: grid; grid-template-columns: 104px 1fr; gap: 12px; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
section { margin-top: 34px; }
.words { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 18px 20px; }
.words p { margin: 0 0 10px; max-width: 78ch; overflow-wrap: anywhere; }
.words p:last-child { margin-bottom: 0; }
pre { margin: 0 0 10px; padding: 12px 14px; background: var(--code); border: 1px solid var(--line);
  border-radius: 8px; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 14px; }
pre code { user-select: all; }
.grid { display: grid; gap: 18px; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); }
figure { margin: 0; padding: 16px 18px; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; min-width: 0; }
figure svg { display: block; width: 100%; max-width: 600px; height: auto; margin-top: 8px; }
.says { margin: 0; color: var(--soft); font-size: 14px; }
.legend { list-style: none; margin: 8px 0 0; padding: 0; display: flex; flex-wrap: wrap;
  gap: 2px 16px; font-size: 13.5px; color: var(--soft); }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
details { margin-top: 10px; font-size: 14px; }
summary { cursor: pointer; color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: top; }
td:last-child { overflow-wrap: break-word; }
thead th { color: var(--soft); font-weight: 600; white-space: nowrap; }
tbody th { font-weight: 500; }
section > .scroll tbody th { white-space: nowrap; }
section > .scroll + h3 { margin-top: 24px; }
th:first-child { text-align: left; padding-left: 0; }
section > .scroll td:last-child, section > .scroll th:last-child { text-align: left;
  min-width: 220px; }
.verdicts { padding-left: 0; list-style: none; }
.verdicts li { margin: 6px 0; padding-left: 12px; border-left: 4px solid var(--plain); }
.verdicts .fed { border-color: var(--fed); }
.verdicts .borderline { border-color: var(--borderline); }
.verdicts .starved { border-color: var(--starved); }
footer { margin-top: 40px; color: var(--soft); font-size: 14px; }
svg text { font-family: inherit; font-size: 12px; fill: var(--ink); paint-order: stroke;
  stroke: var(--card); stroke-width: 3px; stroke-linejoin: round; }
svg .tick, svg .unit { fill: var(--soft); font-size: 11.5px; }
svg .value { font-variant-numeric: tabular-nums; fill: var(--soft); }
svg .name { font-weight: 500; }
svg .grid { stroke: var(--grid); }
svg .axis { stroke: var(--soft); stroke-width: .8; }
svg .mark { stroke: var(--mark); stroke-width: 1.4; stroke-dasharray: 5 4; }
svg .mark-label { font-weight: 600; }
svg .bar { fill: var(--plain); }
svg .bar.fed { fill: var(--fed); }
svg .bar.borderline { fill: var(--borderline); }
svg .bar.starved { fill: var(--starved); }
svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
svg .line.c1 { stroke: var(--c1); } svg .line.c2 { stroke: var(--c2); }
svg .line.c3 { stroke: var(--c3); } svg .line.c4 { stroke: var(--c4); }
svg .line.c5 { stroke: var(--c5); } svg .line.c6 { stroke: var(--c6); }
svg .line.c7 { stroke: var(--c7); }
svg .dot.c1 { fill: var(--c1); } svg .dot.c2 { fill: var(--c2); } svg .dot.c3 { fill: var(--c3); }
svg .dot.c4 { fill: var(--c4); } svg .dot.c5 { fill: var(--c5); } svg .dot.c6 { fill: var(--c6); }
svg .dot.c7 { fill: var(--c7); }
.swatch.c1 { background: var(--c1); } .swatch.c2 { background: var(--c2); }
.swatch.c3 { background: var(--c3); } .swatch.c4 { background: var(--c4); }
.swatch.c5 { background: var(--c5); } .swatch.c6 { background: var(--c6); }
.swatch.c7 { background: var(--c7); }
@media (max-width: 600px) {
  main { padding: 18px 12px 36px; }
  figure, .words { padding: 14px 12px; }
  dl div { grid-template-columns: 88px 1fr; }
}
@media print { body { background: #fff; } figure { break-inside: avoid; } }
"""
