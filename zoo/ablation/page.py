"""The template of report.html (jinja2), with the style of its forest plots."""

from zoo.pages.style import SORTING, STYLE

PAGE = (
    """\
{% macro label(text) %}
{%- for part in text | parts %}{{ part }}{% if not loop.last %}<wbr>{% endif %}{% endfor %}
{%- endmacro %}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ question }}</title>
<style>
"""
    + STYLE
    + """\
.verdicts { padding-left: 1.2rem; } .verdicts li { margin: .3rem 0; overflow-wrap: anywhere; }
.forest { list-style: none; margin: 0; padding: 0; }
.forest li {
  display: grid; grid-template-columns: minmax(9rem, 18rem) 1fr 11.5rem 13.5rem; gap: 0 .8rem;
  align-items: center; border-bottom: 1px solid var(--line); padding: .15rem 0;
}
.forest li.axis { border: 0; }
.forest svg { width: 100%; height: 1.9rem; display: block; overflow: visible; }
.forest .name { overflow-wrap: anywhere; }
.forest .numbers, .forest .verdict { font-size: .9rem; }
.forest .numbers { font-variant-numeric: tabular-nums; }
.forest small { display: block; color: var(--soft); }
.forest .zero { stroke: var(--soft); } .forest .grid { stroke: var(--line); }
.forest text { fill: var(--soft); font-size: .75rem; text-anchor: middle; }
.forest .bar { stroke: currentColor; stroke-width: 2.5; }
.forest .dot { fill: currentColor; fill-opacity: .55; } .forest .mean { fill: currentColor; }
@media (max-width: 44rem) {
  .forest li { grid-template-columns: auto 1fr; padding: .4rem 0; }
  .forest .name, .forest svg { grid-column: 1 / -1; }
  .forest .verdict { text-align: right; }
  .forest small { display: inline; }
}
</style>
</head>
<body>
<header>
<h1>{{ question }}</h1>
<p class="soft">{{ plan.metric }}, {{ found.setting }}; {{ cells[0] }} of {{ cells[1] }} cells have
finished; written {{ written }}.</p>
</header>

<section>
<h2>Verdicts</h2>
{% for baseline, groups in verdicts.items() %}
{% if groups %}
<h3>Against {{ baseline }}</h3>
<ul class="verdicts">
{% for verdict, variants in groups.items() %}
<li><strong class="{{ verdict if verdict in ('better', 'worse') else 'open' }}">
{{- verdict[:1] | upper }}{{ verdict[1:] }}:</strong> {% for variant in variants %}
{{ label(variant) }}{{ ", " if not loop.last }}
{%- endfor %}
</li>
{% endfor %}
</ul>
{% endif %}
{% endfor %}
<p class="soft">{{ power }}.</p>
</section>

<section>
<h2>Differences</h2>
{% for forest in forests %}
<h3>{{ plan.metric }}, variant minus {{ forest.baseline }}</h3>
<ul class="forest">
{% for row in forest.rows %}
<li>
<span class="name">{{ label(row.variant) }}
{%- if row.baseline != forest.baseline %}<small> minus {{ label(row.baseline) }}</small>
{%- endif %}</span>
<svg aria-hidden="true" class="{{ row.style }}">
{% for place, _ in forest.ticks %}
<line class="grid" x1="{{ place }}" x2="{{ place }}" y1="0" y2="100%"/>
{% endfor %}
<line class="zero" x1="{{ forest.zero }}" x2="{{ forest.zero }}" y1="0" y2="100%"/>
{% if row.interval %}
<line class="bar" x1="{{ row.interval[0] }}" x2="{{ row.interval[1] }}" y1="40%" y2="40%"/>
{% endif %}
{% for place in row.seeds %}
<circle class="dot" cx="{{ place }}" cy="80%" r="2.2"/>
{% endfor %}
<svg x="{{ row.mean }}" y="40%" width="1" height="1">
{% if row.style == "better" %}
<path class="mean" d="M0-6 6 5-6 5z"/>
{% elif row.style == "worse" %}
<path class="mean" d="M0 6 6-5-6-5z"/>
{% else %}
<circle class="mean" r="4.5"/>
{% endif %}
</svg>
</svg>
<span class="numbers">{{ row.text }}<small> p {{ row.p }}</small></span>
<span class="verdict {{ row.style }}">{{ row.verdict }}</span>
</li>
{% endfor %}
<li class="axis" aria-hidden="true"><span></span><svg>
{% for place, label in forest.ticks %}
<text x="{{ place }}" y="1rem">{{ label }}</text>
{% endfor %}
</svg></li>
</ul>
{% endfor %}
<p class="soft">Marker: mean of the paired differences; bar: its 95 % t-interval; dots: single
seeds. There is no bar for one seed, nor where all seeds differ by the same. p and verdict are
corrected (Holm) for all {{ plan.comparisons }} comparisons here.</p>
{% if picture %}
<details>
<summary>The same as one picture</summary>
<img alt="Forest plot of the differences above" src="data:image/png;base64,{{ picture }}">
</details>
{% endif %}
</section>

{% for title, each in pictures.items() %}
<section>
<h2>{{ title }}</h2>
<img alt="{{ title }}" src="data:image/png;base64,{{ each }}">
</section>

{% endfor %}
<section>
<h2>Table</h2>
<div class="scroll">
<table>
<thead><tr>{% for name in header %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in body %}
<tr><td>{{ label(row[0]) }}</td>
{%- for cell in row[1:] %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
</div>
<p class="soft">{{ found.caption }}</p>
</section>

<section>
<h2>Seed by seed</h2>
<div class="scroll">
<table>
<thead><tr><th scope="col">variant</th>
{% for seed in plan.seeds %}<th scope="col">seed {{ seed }}</th>{% endfor %}</tr></thead>
<tbody>
{% for name, values in seeds.items() %}
<tr><td>{{ label(name) }}</td>{% for value in values %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
</div>
</section>

{% if curves %}
<section>
<h2>Learning curves</h2>
<p class="soft">{{ plan.metric }} from {{ curves.range[0] }} to {{ curves.range[1] }} over epochs
{{ curves.epochs[0] }} to {{ curves.epochs[1] }}. Thin: a seed; thick: the mean
{%- if curves.reference %}; dashed: the mean of {{ curves.reference_name }}{% endif %}.</p>
<div class="panels">
{% for name, panel in curves.panels.items() %}
<figure>
<svg viewBox="{{ curves.box }}" preserveAspectRatio="none" role="img"
 aria-label="Learning curves of {{ name }}">
{% for points in panel.seeds %}
<polyline class="seed" points="{{ points }}"/>
{% endfor %}
{% if curves.reference %}
<polyline class="reference" points="{{ curves.reference }}"/>
{% endif %}
<polyline class="curve" points="{{ panel.mean }}"/>
</svg>
<figcaption>{{ label(name) }}</figcaption>
</figure>
{% endfor %}
</div>
</section>
{% endif %}

<section>
<h2>Settings</h2>
<dl>
<dt>recipe</dt><dd><code>{{ plan.recipe }}</code></dd>
<dt>flags of all cells</dt><dd><code>{{ shared }}</code></dd>
<dt>seeds</dt><dd>{{ plan.seeds | join(", ") }}</dd>
</dl>
<h3>Flags of the variants</h3>
<dl>
{% for name, words in flags.items() %}
<dt>{{ label(name) }}</dt><dd><code>{{ words or "none" }}</code></dd>
{% endfor %}
</dl>
<h3>Versions and hardware</h3>
<dl>
{% for name, values in environment.items() %}
<dt>{{ name }}</dt><dd>{{ values | join("; ") }}</dd>
{% else %}
<dt>not recorded</dt><dd>the cells wrote no config.json</dd>
{% endfor %}
</dl>
</section>

<section>
<h2>Commands</h2>
{% for what, command in commands.items() %}
<p class="soft">{{ what }}:</p>
<pre>{{ command }}</pre>
{% endfor %}
</section>
<script>
"""
    + SORTING
    + """\
</script>
</body>
</html>
"""
)
