"""What all pages share: their look (light, dark, narrow, printed) and how their tables sort.

`STYLE` is CSS for a page's `<style>`, `SORTING` and `SCROLLING` are JavaScript for its `<script>`.
They load nothing, and hold nothing that a jinja2 template would take for its own. `MACROS` are of
jinja2: a page's head, and the legend of many lines that have an order.
"""

STYLE = """\
:root {
  --page: #ffffff; --text: #1c1c1e; --soft: #5f6368; --line: #d9dbdf; --panel: #f5f6f8;
  --better: #0072b2; --worse: #b84a00; --open: #595959;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #16181c; --text: #e6e7ea; --soft: #a2a7b0; --line: #363a42; --panel: #1f2228;
    --better: #56b4e9; --worse: #f0905a; --open: #a8adb6;
  }
}
@media print {
  :root {
    --page: #ffffff; --text: #000000; --soft: #444444; --line: #bbbbbb; --panel: #ffffff;
    --better: #0072b2; --worse: #b84a00; --open: #595959;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 68rem; background: var(--page);
  color: var(--text); font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", sans-serif;
}
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
h1, h2, h3 { overflow-wrap: anywhere; break-after: avoid; }
p, .soft { max-width: 48rem; }
.soft { color: var(--soft); font-size: .9rem; }
.better { color: var(--better); } .worse { color: var(--worse); } .open { color: var(--open); }
:focus-visible { outline: 2px solid var(--better); outline-offset: 2px; }
.scroll { overflow-x: auto; }
.scroll[data-more~=right] { --end: transparent; } .scroll[data-more~=left] { --start: transparent; }
.scroll[data-more] {
  mask-image: linear-gradient(to right, var(--start, #000), #000 1.6rem, #000 calc(100% - 1.6rem),
    var(--end, #000));
}
.aside { display: block; font-size: .8rem; color: var(--soft); margin: .1rem 0; }
.aside[hidden] { display: none; }
.legend .range {
  display: inline-block; width: 4rem; height: .3rem; border-radius: 1px; margin: 0 .35rem;
  vertical-align: .12em; print-color-adjust: exact; -webkit-print-color-adjust: exact;
  background: linear-gradient(to right in oklch longer hue, var(--better), var(--worse));
}
table { border-collapse: separate; border-spacing: 0; font-size: .9rem; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--line); }
th { vertical-align: bottom; font-weight: 600; }
td { white-space: nowrap; }
td, .values { font-variant-numeric: tabular-nums; }
th:first-child, td:first-child {
  text-align: left; position: sticky; left: 0; background: var(--page); max-width: 14rem;
  white-space: normal; overflow-wrap: break-word; hyphens: manual; min-width: 10.5rem;
}
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid var(--better); }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
.panels {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .8rem;
}
.panels figure {
  margin: 0; background: var(--panel); padding: .4rem; border-radius: .3rem; break-inside: avoid;
}
.panels figcaption { font-size: .8rem; overflow-wrap: anywhere; }
.panels svg { width: 100%; height: 6.5rem; display: block; }
polyline { fill: none; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
.seed { stroke: var(--better); stroke-width: 1; stroke-opacity: .45; }
.curve { stroke: var(--better); stroke-width: 2; }
.reference { stroke: var(--open); stroke-width: 1.5; stroke-dasharray: 4 3; }
pre {
  background: var(--panel); padding: .7rem; border-radius: .3rem; font-size: .85rem;
  white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0 .8rem;
}
dl {
  display: grid; grid-template-columns: fit-content(18rem) 1fr; gap: .2rem 1rem; font-size: .9rem;
}
dt { color: var(--soft); overflow-wrap: anywhere; } dd { margin: 0; overflow-wrap: anywhere; }
dd code { font-size: .85rem; }
summary { cursor: pointer; }
details img, section > img { width: 100%; max-width: 60rem; background: #ffffff; }
@media print { .scroll[data-more] { mask-image: none; } .aside { display: none; } }
@media (max-width: 44rem) {
  dl { grid-template-columns: 1fr; } dd { margin-bottom: .5rem; }
  th:first-child, td:first-child { min-width: 6rem; max-width: 8.5rem; }
}
"""

SORTING = """\
for (const th of document.querySelectorAll("thead th")) {
  const button = document.createElement("button");
  button.append(...th.childNodes);
  th.append(button);
  button.onclick = () => {
    const up = th.getAttribute("aria-sort") !== "ascending";
    for (const other of th.parentNode.children) other.removeAttribute("aria-sort");
    th.setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = th.closest("table").tBodies[0];
    const key = (row) => row.cells[th.cellIndex].textContent.replace(/^< |(?<=\\d),(?=\\d)/g, "");
    const order = (a, b) => {
      const [x, y] = [parseFloat(key(a)), parseFloat(key(b))];
      if (isNaN(x) || isNaN(y)) return isNaN(y) - isNaN(x) || key(a).localeCompare(key(b));
      return x - y;
    };
    body.append(...[...body.rows].sort((a, b) => (up ? order(a, b) : order(b, a))));
  };
}
"""

SCROLLING = """\
for (const box of document.querySelectorAll(".scroll")) {
  const hint = document.createElement("small");
  hint.className = "aside";
  hint.textContent = "\u2194 wider than the screen: scroll sideways";
  hint.hidden = true;
  box.before(hint);
  const look = () => {
    const more = box.scrollWidth - box.clientWidth;
    const sides = [box.scrollLeft > 2 && "left", box.scrollLeft < more - 2 && "right"];
    const text = sides.filter(Boolean).join(" ");
    if (text) box.dataset.more = text;
    else delete box.dataset.more;
    hint.hidden = more <= 2;
  };
  box.addEventListener("scroll", look, { passive: true });
  addEventListener("resize", look);
  addEventListener("load", look);
  look();
}
"""

MACROS = """\
{% macro head(title) %}
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>
{{ caller() }}
</style>
</head>
{%- endmacro %}
{% macro key(names) %}
<span class="legend">{{ names | length }} lines, from {{ names[0] }}<i class="range"></i>to
{{ names[-1] }}</span>
{%- endmacro %}
"""
