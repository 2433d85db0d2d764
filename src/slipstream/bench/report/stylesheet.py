"""The report's style sheet: light and dark by the reader's preference, readable from 320 pixels up.

Tables scroll inside their own box; nothing may widen the page.
"""

from __future__ import annotations

CSS = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c1f23; --soft: #59616b; --grid: #d5d8dc; --box: #f4f6f8;
  --acc: #14642a; --acc-bg: #e2f3e6; --rej: #a3211a; --own: #174ea0; --bad: #a3211a; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --ink: #e6e8ea; --soft: #a4acb5; --grid: #3a4149; --box: #1d2125;
    --acc: #8fdba3; --acc-bg: #1d3325; --rej: #ff9a91; --own: #9cc2ff; --bad: #ff9a91; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 75rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0.5rem 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 0.5rem; border-bottom: 1px solid var(--grid); }
p, dd { max-width: 48rem; }
.lead { font-weight: 600; margin: 0 0 0.5rem; }
.soft, figcaption { color: var(--soft); font-size: 0.9rem; }
.bad { color: var(--bad); font-weight: 600; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: separate; border-spacing: 0; font-size: 14px; line-height: 22px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 4px 11px; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap;
  vertical-align: top; }
th:first-child, td:first-child, td.word, th.word { text-align: left; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper); }
@media (max-width: 40rem) {
  th:first-child, td:first-child { white-space: normal; min-width: 6.5rem; max-width: 9rem; padding-left: 0;
    border-right: 1px solid var(--grid); }
}
td.wrap { white-space: normal; min-width: 16rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); gap: 1rem;
  margin-bottom: 1rem; }
.plots figure { margin: 0; background: var(--box); padding: 0.6rem; min-width: 0; }
.plots svg { display: block; width: 100%; max-width: 36rem; height: auto; color: var(--ink); }
.plots svg * { stroke-linejoin: round; }
.plots text { font-family: system-ui, sans-serif !important; }
.sample { margin: 0.8rem 0; }
.text { white-space: pre-wrap; font-family: ui-monospace, monospace; font-size: 0.85rem; background: var(--box);
  padding: 0.6rem; max-height: 24rem; overflow: auto; }
.acc { color: var(--acc); background: var(--acc-bg); }
.tree { text-decoration: underline double; }
.rej { color: var(--rej); text-decoration: line-through; }
.own { color: var(--own); text-decoration: underline dotted; }
.legend span { margin-right: 0.8rem; }
dl { display: grid; grid-template-columns: minmax(8rem, max-content) 1fr; gap: 0.1rem 1rem; margin: 0; }
dt { color: var(--soft); }
dd { margin: 0; min-width: 0; font-family: ui-monospace, monospace; font-size: 0.85rem; }
summary { cursor: pointer; padding: 0.3rem 0; }
"""
