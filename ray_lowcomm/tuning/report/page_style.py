"""The look of the report's page: laptop, phone and paper, light and dark."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --muted: #57606a; --line: #d0d7de; --ground: #ffffff;
  --panel: #f6f8fa; --accent: #0b5cad; --good: #1a6b34; --warm: #9a4a00; --bad: #a40e26; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --muted: #9aa4af; --line: #3a424c; --ground: #14181d;
  --panel: #1d232b; --accent: #79b8ff; --good: #6fd08c; --warm: #f0a860; --bad: #ff8b95; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 1280px; padding: 1.5rem clamp(0.9rem, 3vw, 2.5rem) 3rem; color: var(--ink);
  background: var(--ground); font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1, h2, p, li, figcaption, dd, code { overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 0.4rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 0.6rem; }
p { margin: 0.4rem 0; max-width: 80ch; }
code, pre { font: 0.875em/1.45 ui-monospace, "SF Mono", Consolas, "DejaVu Sans Mono", monospace; }
pre { margin: 0.5rem 0; padding: 0.7rem 0.9rem; background: var(--panel); border: 1px solid var(--line);
  border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere; }
pre.command { white-space: pre; overflow-x: auto; }
.lead { font-size: 1.05rem; }
.muted { color: var(--muted); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1.5rem;
  align-items: start; }
figure { margin: 0; min-width: 0; }
figure h3 { font-size: 1rem; margin: 0 0 0.4rem; }
figure img { display: block; width: 100%; height: auto; background: #ffffff; border: 1px solid var(--line);
  border-radius: 6px; padding: 0.4rem; }
figcaption { font-size: 0.875rem; color: var(--muted); margin-top: 0.4rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
.scroll:focus-visible { outline: 2px solid var(--accent); }
table { border-collapse: collapse; font-size: 0.875rem; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 0.35rem 0.7rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { background: var(--panel); font-weight: 600; }
thead th { vertical-align: bottom; }
thead th + th { min-width: 4.5rem; }
tbody tr:last-child > * { border-bottom: 0; }
td.number, th.number { text-align: right; white-space: nowrap; }
thead th.number { white-space: normal; }
td.word div { width: max-content; max-width: 24rem; overflow-wrap: anywhere; }
td.status { white-space: nowrap; }
tbody th { position: sticky; left: 0; text-align: right; }
.best > * { font-weight: 600; }
.finished { color: var(--good); } .stopped { color: var(--warm); } .failed { color: var(--bad); }
dl { margin: 0; } dt { font-weight: 600; margin-top: 0.8rem; } dd { margin: 0; }
@media (max-width: 600px) { body { font-size: 15px; } h1 { font-size: 1.35rem; } th, td { padding: 0.3rem 0.5rem; } }
@page { size: landscape; margin: 12mm; }
@media print { :root { color-scheme: light; --ink: #000000; --muted: #444444; --line: #bbbbbb; --ground: #ffffff;
  --panel: #f3f3f3; --accent: #0b5cad; --good: #1a6b34; --warm: #9a4a00; --bad: #a40e26; }
  body { max-width: none; padding: 0; font-size: 10pt; } .figures { grid-template-columns: 1fr 1fr; gap: 0.8rem; }
  figure, tr, h2, h3 { break-inside: avoid; } h2, h3 { break-after: avoid; }
  figure img { max-height: 150mm; width: auto; max-width: 100%; }
  .scroll { overflow: visible; border: 0; } table { font-size: 7pt; }
  thead { display: table-header-group; } th, td { padding: 0.15rem 0.25rem; } thead th + th { min-width: 0; }
  td.word div { width: auto; }
  thead th + th, td.word { overflow-wrap: anywhere; } tbody th { position: static; } .extra { display: none; }
  pre.command { white-space: pre-wrap; }
}
"""
