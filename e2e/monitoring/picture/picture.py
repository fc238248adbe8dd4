"""Draws the dashboard as a picture, from what a Prometheus has.

It asks the server in PROMETHEUS_URL for every expression of dashboard.json, and
lays the panels out as the dashboard does:

    python picture.py dashboard.json docs/dashboard.png SECONDS [ROWS]

SECONDS is how far back it looks, ROWS the titles of the rows to draw, separated
by commas; all if there are none.
"""

import json
import math
import os
import re
import sys
import textwrap
import time
import urllib.parse
import urllib.request

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

COLOURS = ["#3274d9", "#e0752d", "#56a64b", "#a352cc", "#d1495b", "#d9a514", "#17a2a2", "#7a7a7a"]
STATES = {"green": "#37872d", "orange": "#d9730d", "red": "#c4162a"}
WIDTH, UNIT = 16.0, 0.30  # inches: of the picture, of a unit of height


def ask(path, **parameters):
    url = f"{os.environ['PROMETHEUS_URL']}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)["data"]["result"]


def fill(expression):
    for name, value in {"$__rate_interval": "20s", "$namespace": ".*", "$job": ".*"}.items():
        expression = expression.replace(name, value)
    return expression


def legend(text, labels):
    return re.sub(r"{{\s*(\w+)\s*}}", lambda m: labels.get(m[1], ""), text).strip()


def scaled(value, steps):
    for limit, divisor, suffix in steps:
        if abs(value) >= limit:
            return f"{value / divisor:.3g}{suffix}"
    return f"{value:.3g}"


def shown(value, unit):
    """The value as Grafana would show it, more or less."""
    if math.isnan(value):
        return "–"
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s":
        if value == 0:
            return "0 s"
        return scaled(value, [(86400, 86400, " d"), (3600, 3600, " h"), (60, 60, " min"), (1, 1, " s"), (1e-3, 1e-3, " ms"), (0, 1e-6, " µs")])
    if unit == "bytes":
        return scaled(value, [(2**30, 2**30, " GiB"), (2**20, 2**20, " MiB"), (2**10, 2**10, " KiB"), (0, 1, " B")])
    per = {"mps": " /s", "ops": " /s"}.get(unit, "")
    return scaled(value, [(1e6, 1e6, " M"), (1e3, 1e3, " k")]) + per


def box(figure, place, height):
    """Where the panel lies, in parts of the picture; with a frame around it."""
    gap = 0.006
    left, width = place["x"] / 24, place["w"] / 24
    bottom, tall = 1 - (place["y"] + place["h"]) * UNIT / height, place["h"] * UNIT / height
    pad = gap * WIDTH / height
    area = (left + gap / 2, bottom + pad / 2, width - gap, tall - pad)
    figure.patches.append(FancyBboxPatch(area[:2], *area[2:], boxstyle="square,pad=0", transform=figure.transFigure,
                                         facecolor="white", edgecolor="#dcdfe4", linewidth=0.8, zorder=-1))
    return area


def title(figure, area, text, height):
    figure.text(area[0] + 0.07 / WIDTH * 1.2, area[1] + area[3] - 0.09 / height, text, fontsize=9.5, weight="bold", color="#24292e", va="top")


def draw_series(figure, panel, area, height, start, end):
    title(figure, area, panel["title"], height)
    custom = panel["fieldConfig"]["defaults"].get("custom", {})
    unit = panel["fieldConfig"]["defaults"]["unit"]
    axes = figure.add_axes((area[0] + 0.66 / WIDTH, area[1] + 0.56 / height, area[2] - 0.80 / WIDTH, area[3] - 0.92 / height))
    lines = []
    for target in panel["targets"]:
        for series in ask("query_range", query=fill(target["expr"]), start=start, end=end, step=2):
            values = [(float(t) - end, float(v)) for t, v in series["values"]]
            if any(not math.isnan(v) for _, v in values):
                lines.append((legend(target["legendFormat"], series["metric"]), values))
    logarithmic = custom.get("scaleDistribution", {}).get("type") == "log"
    stacked = custom.get("stacking", {}).get("mode") == "normal"
    below = {}
    top = 0.0
    for i, (name, values) in enumerate(lines):
        colour = COLOURS[i % len(COLOURS)]
        times = [t / 60 for t, _ in values]
        if stacked:
            low = [below.get(t, 0.0) for t, _ in values]
            high = [b + (0 if math.isnan(v) else v) for b, (_, v) in zip(low, values)]
            below.update({t: h for (t, _), h in zip(values, high)})
            axes.fill_between(times, low, high, color=colour, alpha=0.45, linewidth=0)
            axes.plot(times, high, color=colour, linewidth=1, label=name)
        else:
            high = [v if v > 0 or not logarithmic else math.nan for _, v in values]
            axes.plot(times, high, color=colour, linewidth=1.3, label=name)
            if not logarithmic:
                axes.fill_between(times, 0, high, color=colour, alpha=0.07, linewidth=0)
        top = max([top] + [v for v in high if not math.isnan(v)])
    for step in panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])[1:]:
        axes.axhline(step["value"], color=STATES[step["color"]], linewidth=1, linestyle=(0, (4, 3)))
        top = max(top, step["value"])
    if logarithmic and top > 0:
        axes.set_yscale("log")
        axes.minorticks_off()
        low, high = axes.get_ylim()
        if high / low < 30:  # less than a tick or two
            axes.set_ylim(low / 5, high * 5)
    else:
        axes.set_ylim(0, top * 1.12 if top > 0 else 1)
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=unit == "short" and top >= 2))
        if unit == "bytes" and top > 0:
            axes.yaxis.set_major_locator(MultipleLocator(2 ** math.floor(math.log2(top / 2))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: shown(v, unit)))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: "now" if v == 0 else f"{v:.0f} min".replace("-", "−")))
    axes.set_xlim((start - end) / 60, 0)
    axes.tick_params(labelsize=7.5, colors="#5a626b", length=0)
    axes.grid(color="#eceef1", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    if lines:
        room = (area[2] * WIDTH - 0.2) * 17  # letters
        columns = max(1, min(len(lines), int(room / (max(len(n) for n, _ in lines) + 5))))
        figure.legend(*axes.get_legend_handles_labels(), loc="lower left", bbox_to_anchor=(area[0] + 0.02 / WIDTH, area[1] + 0.005 / height),
                      ncols=columns, fontsize=7.5, frameon=False, handlelength=1.1, handletextpad=0.4, columnspacing=1.1, labelcolor="#3b4148", borderpad=0.35)
    else:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", va="center", color="#8a929b", fontsize=9)


def draw_stat(figure, panel, area, height, end):
    title(figure, area, panel["title"], height)
    result = ask("query", query=fill(panel["targets"][0]["expr"]), time=end)
    defaults = panel["fieldConfig"]["defaults"]
    value = float(result[0]["value"][1]) if result else math.nan
    colour = "#8a929b"
    for step in defaults["thresholds"]["steps"]:
        if step["value"] is None or value >= step["value"]:
            colour = STATES[step["color"]]
    figure.text(area[0] + area[2] / 2, area[1] + area[3] * 0.40, shown(value, defaults["unit"]), fontsize=22, color=colour, ha="center", va="center")


def draw_table(figure, panel, area, height, end):
    title(figure, area, panel["title"], height)
    rows = [r["metric"] for r in ask("query", query=fill(panel["targets"][0]["expr"]), time=end)]
    columns = ["instance", "job", "namespace", "version", "go"]
    for i, name in enumerate(columns):
        x = area[0] + 0.1 / WIDTH + i * (area[2] - 0.2 / WIDTH) / len(columns)
        for j, text in enumerate([name] + [r.get(name, "") for r in rows]):
            figure.text(x, area[1] + area[3] - (0.45 + 0.25 * j) / height, textwrap.shorten(text, 22, placeholder="…"),
                        fontsize=8, va="top", color="#5a626b" if j == 0 else "#24292e", weight="bold" if j == 0 else "normal")


def chosen(panels, rows):
    """The panels of the rows, moved up to where rows are left out."""
    up, taken, keep, from_y = 0, [], True, 0
    for panel in sorted(panels, key=lambda p: (p["gridPos"]["y"], p["gridPos"]["x"])):
        if panel["type"] == "row":
            if not keep:
                up += panel["gridPos"]["y"] - from_y
            keep, from_y = not rows or panel["title"] in rows, panel["gridPos"]["y"]
        if keep:
            taken.append(dict(panel, gridPos=dict(panel["gridPos"], y=panel["gridPos"]["y"] - up)))
    return taken


def main():
    source, target, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    rows = sys.argv[4].split(",") if len(sys.argv) > 4 else []
    with open(source, encoding="utf-8") as file:
        panels = chosen(json.load(file)["panels"], rows)
    height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels) * UNIT
    plt.rcParams["font.family"] = "DejaVu Sans"
    figure = plt.figure(figsize=(WIDTH, height), facecolor="#f4f5f7")
    end = time.time()
    for panel in panels:
        place = panel["gridPos"]
        if panel["type"] == "row":
            figure.text(0.006, 1 - (place["y"] + 0.6) * UNIT / height, panel["title"], fontsize=11.5, weight="bold", color="#24292e", va="center")
            continue
        area = box(figure, place, height)
        if panel["type"] == "stat":
            draw_stat(figure, panel, area, height, end)
        elif panel["type"] == "table":
            draw_table(figure, panel, area, height, end)
        else:
            draw_series(figure, panel, area, height, end - seconds, end)
    figure.savefig(target, dpi=120, pil_kwargs={"optimize": True})


main()
