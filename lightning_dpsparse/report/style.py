"""The CSS of the page, for phones and for A4, light and dark. It loads nothing from elsewhere."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #57606a; --paper: #fff; --rule: #d0d7de;
  --wash: #f6f8fa; --link: #0550ae; --curve: #0969da; --good: #1a7f37; --warn: #9a6700;
  --bad: #cf222e; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --dim: #9da7b3; --paper: #0d1117; --rule: #3d444d; --wash: #161b22;
    --link: #79b8ff; --curve: #58a6ff; --good: #3fb950; --warn: #d29922; --bad: #ff7b72; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 50rem; padding: 1.25rem 1rem 3rem; color: var(--ink);
  background: var(--paper); font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", "Liberation Sans", Arial, sans-serif; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
h1 { margin: 0; font-size: 1.6rem; line-height: 1.2; }
h2 { margin: 2.25rem 0 .6rem; font-size: 1.15rem; line-height: 1.3; }
p, ul { margin: .6rem 0; }
ul { padding-left: 1.25rem; }
a { color: var(--link); }
[data-fact] { white-space: pre-line; }
.dim { color: var(--dim); font-size: .875rem; }
.box { border: 3px solid; border-radius: 8px; padding: 1rem 1.25rem; background: var(--wash); }
.private { border-color: var(--good); }
.tainted { border-color: var(--warn); border-style: dashed; }
.broken { border-color: var(--bad); border-width: 6px; border-style: double; }
.box > :last-child { margin-bottom: 0; }
.verdict { margin: 0; font-weight: 700; letter-spacing: .03em; }
.private .verdict { color: var(--good); }
.tainted .verdict { color: var(--warn); }
.broken .verdict, .failed { color: var(--bad); }
.failed { font-weight: 700; }
.sentence { font-size: 1.15rem; line-height: 1.4; }
.big { display: flex; flex-wrap: wrap; gap: .5rem 3rem; margin: .75rem 0 0; }
.big dt { color: var(--dim); font-size: .875rem; }
.big dd { margin: 0; font-size: 2.4rem; font-weight: 650; line-height: 1.15; }
table { width: 100%; border-collapse: collapse; margin: .6rem 0; }
th, td { padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--rule); text-align: left;
  vertical-align: top; }
th:last-child, td:last-child { padding-right: 0; }
thead th { overflow-wrap: normal; color: var(--dim); font-size: .875rem; font-weight: 600;
  vertical-align: bottom; }
tbody th { font-weight: 400; color: var(--dim); }
.defs th { width: 40%; }
.wide td:first-child { min-width: 6em; }
.narrow { max-width: 28rem; }
.number { text-align: right; overflow-wrap: normal; }
.plot { display: block; width: 100%; max-width: 34rem; height: auto; margin: .75rem 0; }
.plot text { fill: var(--ink); font-size: 12px; }
.plot .end { text-anchor: end; }
.plot .middle { text-anchor: middle; }
.plot .grid { stroke: var(--rule); stroke-width: 1; }
.plot .axis { stroke: var(--dim); stroke-width: 1; fill: none; }
.plot .target { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 6 4; }
.plot .curve { stroke: var(--curve); stroke-width: 2.25; fill: none; stroke-linejoin: round; }
.plot .dot { fill: var(--curve); }
.points { columns: 3 11rem; column-gap: 2rem; list-style: none; padding: 0; font-size: .875rem; }
.points li { display: flex; white-space: nowrap; justify-content: space-between;
  gap: .75rem; break-inside: avoid; border-bottom: 1px solid var(--rule); }
.tick { display: inline-block; width: .9em; height: .9em; margin-right: .5em;
  border: 1.5px solid var(--dim); vertical-align: -.08em; }
.sign { display: grid; grid-template-columns: 2fr 2fr 1fr; gap: 1.5rem; margin-top: 3.5rem; }
.sign p { margin: 0; padding-top: .25rem; border-top: 1px solid var(--ink); }
@media (max-width: 30rem) {
  .box { padding: .75rem .9rem; }
  th, td { padding-right: .5rem; }
  .wide, .defs th { font-size: .875rem; }
  .wide thead th { font-size: .75rem; }
}
@media print {
  @page { size: A4; margin: 16mm; }
  :root { color-scheme: light; font-size: 10pt; }
  body { max-width: none; padding: 0; }
  h2 { margin-top: 1.4rem; }
  h2, h2 + p { break-after: avoid; }
  a { color: inherit; text-decoration: none; }
  .box, .plot, .sign, tr { break-inside: avoid; }
  .big dd { font-size: 22pt; }
  .plot { max-width: 12cm; }
}
"""
