"""One look for all figures, and one way to save them: PNG, the numbers beside it as CSV, and how
both were made.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import cycle, groupby
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from IPython.display import Markdown
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cats._io import versions, write_json, writing
from cats.paper import captions
from cats.paper.places import FIGURES, announce
from cats.stats.trials import summary

TARGET = "target  1 − ε  (logarithmic in ε)"
BESIDE = dict(textcoords="offset points", fontsize="small")  # a word beside a point
SOLID, DASHED, DOTTED, MIXED = "", (3, 1.5), (1, 1), (5, 1, 1, 1)


class Look(NamedTuple):
    """How something is written and drawn: the same in every picture."""

    name: str
    colour: str
    marker: str
    dash: str | tuple[float, ...] = SOLID


# Okabe and Ito's colours first, safe for colour-blind readers. Methods that do not promise epsilon
# are dashed.
METHODS = {
    "static": Look("static", "#999999", "v", (4, 2)),
    "threshold": Look("threshold", "#666666", "^", DOTTED),
    "naive": Look("naive", "#8C6D31", "<", (6, 2, 1, 2)),
    "independent": Look("independent", "#56B4E9", "D"),
    "shared": Look("shared", "#0072B2", "o"),
    "shared_all": Look("shared_all", "#009E73", "p"),
    "first_exit": Look("first_exit", "#D55E00", "s"),
    "pac": Look("pac", "#CC79A7", "P"),
    "ltt": Look("ltt", "#E69F00", "X"),
    "band": Look("band", "#882255", "h"),
    "crc": Look("crc", "#44AA99", "d"),
    "oracle": Look("oracle", "#000000", "*", (1, 2)),
}
MEASURES = {
    "meta": Look("meta", "#D55E00", "o"),
    "sm": Look("p max", "#0072B2", "s", DASHED),
    "diff": Look("difference", "#E69F00", "^", DOTTED),
    "entropy": Look("entropy", "#009E73", "D", MIXED),
    "kl": Look("KL", "#CC79A7", "P", (4, 1)),
    "patience": Look("patience", "#999999", "v", (1, 2)),
    "random": Look("random", "#666666", "x", (1, 3)),
}
RECIPES = {
    "paper": Look("paper", "#0072B2", "o"),
    "distilled": Look("distilled", "#D55E00", "s"),
    "settled": Look("settled", "#777777", "v", DOTTED),
    "oracle": Look("oracle", "#000000", "*", DOTTED),
}
SMALL_MODELS = {
    "mobilebert-uncased": Look("MobileBERT", "#0072B2", "o"),
    "bge-small-en-v1.5": Look("bge-small", "#D55E00", "s", DASHED),
    "all-mpnet-base-v2": Look("MPNet", "#009E73", "D", DOTTED),
}
MODELS = SMALL_MODELS | {  # and the paper's
    "albert-xlarge-v2": Look("Albert-xlarge", "#CC79A7", "P", MIXED),
    "albert-base-v2": Look("Albert-base", "#E69F00", "X", (4, 1)),
    "roberta-large": Look("RoBERTa-large", "#56B4E9", "^", (1, 2)),
}
TASKS = {
    "imdb": Look("IMDB", "#0072B2", "o"),
    "vitaminc": Look("VitaminC", "#D55E00", "s"),
    "ag_news": Look("AG News", "#009E73", "D"),
    "stsb": Look("STS-B", "#CC79A7", "P"),
}
# for what is added from outside, in turn
OTHERS = ("#332288", "#117733", "#AA4499", "#DDCC77", "#661100", "#88CCEE")
MARKS, STROKES = "<>h8dH", (SOLID, DASHED, DOTTED, MIXED, (4, 1), (1, 2))

NAMES = {
    slug: look.name
    for slug, look in (TASKS | MODELS | {m: MEASURES[m] for m in ("sm", "meta")}).items()
}  # as the paper or their makers write them


def looks(values: Iterable[str], known: Mapping[str, Look] = METHODS) -> dict[str, Look]:
    """The look of each value, those of the registry first and in its order; others take what is
    free, in the order they come.

    >>> list(looks(["mine", "shared", "static"])), looks(["mine"])["mine"].colour
    (['static', 'shared', 'mine'], '#332288')
    """
    values = list(dict.fromkeys(values))
    free: Iterator[Any] = zip(cycle(OTHERS), cycle(MARKS), cycle(STROKES))
    found = {value: known[value] for value in known if value in values}
    return found | {value: Look(value, *next(free)) for value in values if value not in known}


def palette(values: Iterable[str], known: Mapping[str, Look] = METHODS) -> dict[str, str]:
    """The colour of each value, for seaborn's `palette`."""
    return {value: look.colour for value, look in looks(values, known).items()}


def written(name: str) -> str:
    """A task, a model or a measure as a reader knows it."""
    return NAMES.get(name, name)


def title(run: str) -> str:
    """A run as a reader knows it.

    >>> title("ag_news-bge-small-en-v1.5-0"), title("imdb-bert-tiny-2")
    ('AG News, bge-small', 'IMDB, bert-tiny, seed 2')
    """
    ((task, model, seed),) = re.findall(r"^(\w+)-(.+)-(\d+)$", run)
    return ", ".join([written(task), written(model)] + [f"seed {seed}"] * (seed != "0"))


def pair_title(name: str) -> str:
    """A pair "task backbone" as a reader knows it, with what may follow it.

    >>> pair_title("ag_news bge-small-en-v1.5: rank off by one")
    'AG News, bge-small: rank off by one'
    """
    pair, colon, rest = name.partition(":")
    return ", ".join(map(written, pair.split(" ", 1))) + colon + rest


def use_style() -> None:
    """The shared look: call it once at the top of a notebook."""
    sns.set_theme(
        context="paper",
        style="whitegrid",
        rc={
            "figure.dpi": 110,
            "savefig.dpi": 200,
            "pdf.fonttype": 42,  # letters stay letters: journals refuse Type 3
            "font.size": 10,  # large enough at the width of a column
            "axes.titlesize": 10,
            "axes.labelsize": 10,
            "xtick.labelsize": 9,
            "ytick.labelsize": 9,
            "legend.fontsize": 9,
            "legend.frameon": False,
            "lines.linewidth": 1.6,
        },
    )


def save(
    name: str,
    figure: Figure | None = None,
    data: pd.DataFrame | None = None,
    parameters: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    measured: Mapping[str, Any] | None = None,
) -> Path:
    """Write figures/NAME.png, .pdf, .csv and .json (parameters, versions, hashes of the inputs);
    returns the PNG's path.

    measured  for results in seconds: machine, date and repeats (`timing.measured_here`)

    The batch says where figures/ is (CATS_FIGURES); a notebook run by hand writes to build/figures.
    """
    announce(FIGURES)
    undated = {
        "png": {"Software": None},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }  # the same bytes every time
    if figure is not None:
        for kind, metadata in undated.items():
            with writing(FIGURES / f"{name}.{kind}") as path:
                figure.savefig(path, bbox_inches="tight", metadata=metadata)
    if data is not None:
        with writing(FIGURES / f"{name}.csv") as path:
            data.to_csv(path, index=False, float_format="%.6g")
    made = {
        "parameters": parameters or {},
        "inputs": inputs or {},
        "versions": versions("matplotlib", "seaborn"),
    }
    made |= {"measured": measured} if measured else {}
    write_json(FIGURES / f"{name}.json", made)
    return FIGURES / f"{name}.png"


def save_table(
    name: str,
    data: pd.DataFrame,
    shown: pd.DataFrame | None = None,
    grey: Iterable[int] = (),
    parameters: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    measured: Mapping[str, Any] | None = None,
    heads: Mapping[str, tuple[str, str]] | None = None,
    bold: Iterable[tuple[int, str]] = (),
) -> Any:
    """Write figures/NAME.csv (the numbers), .md and .tex (as shown; the latter as it would stand in
    a paper) and .json; returns the table to look at.

    data   a tidy frame of numbers
    shown  the frame a reader sees, its cells formatted already; by default `data` itself
    grey   positions of the rows that promise nothing
    heads  {column: (group, name)}: grouped heads for LaTeX
    bold   (row, column) of the best cells
    """
    shown = (data if shown is None else shown).reset_index(drop=True)
    grey, bold = set(grey), set(bold)

    def paint(row: pd.Series) -> list[str]:
        faint = "color: gray" if row.name in grey else ""
        return ["font-weight: bold" if (row.name, c) in bold else faint for c in row.index]

    look = lambda: shown.style.hide(axis="index").apply(paint, axis=1)  # a Styler changes in place
    with writing(FIGURES / f"{name}.md") as path:
        path.write_text(shown.to_markdown(index=False, disable_numparse=True) + "\n")
    with writing(FIGURES / f"{name}.tex") as path:
        path.write_text(_latex(look(), name, heads or {}))
    save(name, data=data, parameters=parameters, inputs=inputs, measured=measured)
    return look()


def readable(frame: pd.DataFrame, digits: int = 3) -> pd.DataFrame:
    """A frame as a reader sees it: names as they are written, numbers to so many digits, ε and
    targets as they were given, a truth as a word.

    >>> readable(pd.DataFrame({"task": ["ag_news"], "epsilon": [0.05], "layers": [4.7]}), 2)
          task epsilon layers
    0  AG News    0.05   4.70
    """

    def text(column: pd.Series) -> pd.Series:
        if column.dtype == bool:
            return column.map({True: "yes", False: "no"})
        if column.dtype.kind == "f":
            given = column.name in ("epsilon", "target")
            return column.map(("{:g}" if given else f"{{:.{digits}f}}").format)
        return column.astype(str)

    return frame.replace(NAMES).apply(text)


def _latex(look: Any, name: str, heads: Mapping[str, tuple[str, str]]) -> str:
    """A table as LaTeX (booktabs) with grouped heads, caption and label."""
    columns = list(look.columns)
    pairs = [tuple(map(_escaped, heads.get(column, ("", str(column))))) for column in columns]
    text = look.format(escape="latex").format_index(escape="latex", axis=1)
    body = text.to_latex(hrules=True, convert_css=True, column_format="l" * len(columns))
    head = " & ".join(leaf for _, leaf in pairs) + r" \\"
    if heads:
        groups = [(group, len(list(same))) for group, same in groupby(pairs, lambda pair: pair[0])]
        above, rules, at = [], [], 1
        for group, width in groups:
            above.append(
                rf"\multicolumn{{{width}}}{{c}}{{{group}}}" if group else " & " * (width - 1)
            )
            rules += [rf"\cmidrule(lr){{{at}-{at + width - 1}}}"] if group else []
            at += width
        head = " & ".join(above) + r" \\" + "\n" + " ".join(rules) + "\n" + head
    lines = body.splitlines()
    start = lines.index(r"\toprule")
    lines[start + 1 : lines.index(r"\midrule")] = [head]
    caption = rf"\caption{{{_escaped(captions.caption(name).replace('`', ''))}}}"
    opening = [r"\begin{table}", r"\centering", r"\small", caption, rf"\label{{tab:{name}}}"]
    return "\n".join([*opening, *lines, r"\end{table}"]) + "\n"


def _escaped(text: str) -> str:
    """Text with what LaTeX would read as commands made plain."""
    signs = {"ε": r"$\varepsilon$", "≥": r"$\ge$", "−": "$-$"}
    text = re.sub(r"([&%$#_{}])", r"\\\1", text)
    return re.sub("[ε≥−]", lambda found: signs[found[0]], text)


def save_reading(name: str, text: str) -> Markdown:
    """Write figures/NAME.md, a reading in seconds, which is kept with its numbers; returns it to
    look at.
    """
    with writing(FIGURES / f"{name}.md") as path:
        path.write_text(text + "\n")
    return Markdown(text)


def epsilon_axis(axis: Axes, epsilons: Iterable[float], ticks: bool = True) -> None:
    """A logarithmic axis of ε, written as the target 1-ε: 60, 80, 90, 95, 99 %, strict to the
    right, where it matters.
    """
    low, high = min(epsilons), max(epsilons)
    shown = [e for e in (0.4, 0.2, 0.1, 0.05, 0.01) if low - 1e-9 <= e <= high + 1e-9]
    shown = shown or sorted(set(epsilons))
    axis.set(xscale="log", xlim=(high, low))
    axis.set_xticks(shown, [f"{100 * (1 - e):g} %" for e in shown] if ticks else [])
    axis.set_xticks([], minor=True)


def hide_empty(axes: Any) -> None:
    """Take away panels of a grid in which nothing is drawn; their neighbours get the labels."""
    for axis in axes.flat:
        axis.set_visible(axis.has_data())
    for row in axes:
        first = next(axis for axis in row if axis.get_visible())
        first.set_ylabel(row[0].get_ylabel(), visible=True)
        first.tick_params(labelleft=True)
    for column in axes.T:
        last = next(axis for axis in column[::-1] if axis.get_visible())
        last.set_xlabel(column[-1].get_xlabel(), visible=True)
        last.tick_params(labelbottom=True)


def promise_zone(axis: Axes) -> None:
    """Shade what lies below the promise: distances to the target under zero."""
    axis.axhline(0, color="black", linewidth=0.8, zorder=1)
    axis.axhspan(-100, 0, color="#888888", alpha=0.18, linewidth=0, zorder=0)


def coin(axis: Axes, label: bool = True) -> None:
    """A line at 0.5, the AUROC of a coin."""
    axis.axhline(0.5, color="black", linewidth=1.2, linestyle=":", zorder=1)  # above the grid
    place = dict(xycoords=axis.get_yaxis_transform(), va="top", ha="right")
    if label:
        axis.annotate("a coin", (0.99, 0.49), fontsize="small", color="#444444", **place)


def label_ends(axis: Axes, ends: Mapping[str, tuple[float, Any]], gap: float = 0.062) -> None:
    """Names to the right of an axis, each where its line ends; those too near are moved apart, with
    a thin line to their place.

    ends   {name: (y, colour)}, y on the axis' own scale
    """
    low, high = axis.get_ylim()
    place = {name: (y - low) / (high - low) for name, (y, _) in ends.items()}
    order = sorted(place, key=lambda name: place[name])
    spots = [place[name] for name in order]
    for i in range(1, len(spots)):  # upwards where they touch, then down from the top
        spots[i] = max(spots[i], spots[i - 1] + gap)
    for i in range(len(spots) - 1, -1, -1):
        spots[i] = min(spots[i], 1.02 - gap * (len(spots) - 1 - i))
    for name, spot in zip(order, spots):
        axis.annotate(
            name,
            (1.0, place[name]),
            (1.06, spot),
            xycoords="axes fraction",
            color=ends[name][1],
            va="center",
            fontsize="medium",
            arrowprops=dict(
                arrowstyle="-", color=ends[name][1], linewidth=0.6, relpos=(0, 0.5), shrinkA=1
            ),
            annotation_clip=False,
        )


def _curve(axis: Axes, part: pd.DataFrame, column: str, line: Mapping[str, Any]) -> float:
    """A mean over trials by ε, the 16th to 84th percentile shaded, marks at the ticks."""
    groups = part.groupby("epsilon")[column]
    mean, low, high = groups.mean(), groups.quantile(0.16), groups.quantile(0.84)
    marked = [i for i, e in enumerate(mean.index) if round(e, 9) in (0.4, 0.2, 0.1, 0.05, 0.01)]
    axis.plot(mean.index, mean, markevery=marked, **line)
    axis.fill_between(mean.index, low, high, color=line["color"], alpha=0.12, linewidth=0)
    return mean.iloc[0]


def consistency_and_layers(
    frame: pd.DataFrame,
    n_layers: int | None = None,
    title: str = "",
    by: str | None = None,
    style: str = "method",
) -> Figure:
    """Figure 3's layout against a logarithmic ε: the distance of consistency to its target above,
    layers below; 16th to 84th percentile shaded.

    # one table, dashes where nothing is promised; one column a task, dashes for p max
    consistency_and_layers(frame, 24)
    consistency_and_layers(frame, 24, by="task", style="measure")

    frame     what `cats.evaluate` returns, more columns allowed
    n_layers  of the full model; None: the column `share`, of layers used, is drawn in place of
              `layers`
    by        the column whose values get a column of panels each
    style     the column line styles tell apart; colours and marks tell methods apart, and their
              names stand where the lines of the last panel end
    """
    frame = frame.assign(distance=100 * (frame["consistency"] - 1 + frame["epsilon"]))
    dashes = _dashes(style, frame[style])
    if style == "measure":  # static has no measure: one line is enough, and it is drawn through
        first = next(iter(dashes))
        frame = frame[(frame["method"] != "static") | (frame["measure"] == first)]
    groups = dict(list(frame.groupby(by, sort=False))) if by else {"": frame}
    cost, known = "share" if n_layers is None else "layers", looks(frame["method"])
    size = (2.65 * len(groups) + 1.5, 5.2) if by else (5.4, 6.4)
    figure, axes = plt.subplots(
        2, len(groups), figsize=size, sharex=True, sharey="row", squeeze=False, layout="constrained"
    )
    for pair, (name, part) in zip(axes.T, groups.items()):
        promise_zone(pair[0])
        ends: dict[str, tuple[float, str]] = {}
        lines = part.assign(_kind=part[style]).groupby(["method", "_kind"])
        drawn = dict(list(lines))
        for method, kind in sorted(drawn, key=lambda m: (list(known).index(m[0]), m[1] != "meta")):
            look = known[method]
            line = dict(color=look.colour, marker=look.marker, markersize=3.5, linewidth=1.5)
            dash = look.dash if style == "method" else dashes[kind]
            line |= {"dashes": dash} if dash else {}
            _curve(pair[0], drawn[method, kind], "distance", line)
            end = _curve(pair[1], drawn[method, kind], cost, line)
            ends.setdefault(look.name, (end, look.colour))
        pair[0].set_title(written(name))
        for axis in pair:
            epsilon_axis(axis, frame["epsilon"])
    low, high = frame["distance"].quantile([0.005, 0.995])
    axes[0, 0].set_yscale("symlog", linthresh=1, linscale=0.6)
    marks = [t for t in (-30, -10, -3, -1, 0, 1, 3, 10, 30) if min(low, -1) <= t <= max(high, 1)]
    axes[0, 0].set_yticks(marks, [f"{t:+d}" if t else "0" for t in marks])
    axes[0, 0].set_yticks([], minor=True)
    axes[0, 0].set(ylabel="distance to the target\n(points of P(G = F))")
    axes[0, 0].set_ylim(min(1.4 * low, -1.6), max(1.3 * high, 1.5))
    box = dict(facecolor="white", alpha=0.6, linewidth=0, pad=1.5)
    place = dict(xycoords="axes fraction", color="#333333", bbox=box)
    axes[0, 0].annotate("below the promise", (0.03, 0.03), **place)
    top = 1 if n_layers is None else n_layers
    axes[1, 0].set(
        ylabel="share of layers used" if n_layers is None else f"layers used (of {n_layers})",
        ylim=(0, top * 1.02),
    )
    label_ends(axes[1, -1], ends)
    figure.supxlabel(TARGET, fontsize="medium")
    figure.suptitle(title, fontsize="medium")
    if style != "method" and len(dashes) > 1:
        handles = [
            Line2D([], [], color="black", linewidth=1.5, label=written(kind), **stroke(dash))
            for kind, dash in dashes.items()
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
    return figure


def stroke(dash: Any) -> dict[str, Any]:
    """A look's dash as matplotlib takes it."""
    return {"linestyle": (0, dash)} if dash else {}


def _dashes(column: str, values: Iterable[str]) -> dict[str, Any]:
    """Dashes by value of a column; methods that promise epsilon are drawn through."""
    known = {"method": METHODS, "measure": MEASURES, "backbone": MODELS}.get(column, {})
    return {value: look.dash for value, look in looks(values, known).items()}


def numbers(frame: pd.DataFrame, by: str | Iterable[str] = "task") -> pd.DataFrame:
    """The numbers behind consistency_and_layers, for its CSV: `cats.summary` for each value of
    `by`, one level of columns.
    """
    keys = [by] if isinstance(by, str) else list(by)
    parts = []
    for values, part in frame.groupby(keys, sort=False):
        table = summary(part.drop(columns=keys).dropna(axis=1, how="all"))
        table.columns = [f"{value}_{kind}" for value, kind in table.columns]
        parts.append(
            table.reset_index().assign(**dict(zip(keys, values)))[
                [*keys, "method", "measure", "epsilon", *table.columns]
            ]
        )
    return pd.concat(parts, ignore_index=True)


def bar(colour: str, full: bool = True) -> dict[str, Any]:
    """A bar's look: filled, or pale with an edge, so that two side by side differ in grey, too."""
    return dict(facecolor=colour if full else (colour, 0.3), edgecolor=colour, linewidth=0.6)


def exit_histograms(frame: pd.DataFrame, n_layers: int, title: str = "") -> Figure:
    """Figure 5's layout: the share of inputs that leave at each layer, one row a task, one column
    an epsilon, the means marked.

    frame   task, epsilon, method, layer (1..l), share
    """
    tasks, epsilons, methods = (
        list(dict.fromkeys(frame[column])) for column in ("task", "epsilon", "method")
    )
    size = (2.7 * len(epsilons) + 1.1, 1.8 * len(tasks) + 0.9)
    figure, axes = plt.subplots(
        len(tasks),
        len(epsilons),
        figsize=size,
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    width, colours = 0.84 / len(methods), palette(methods)
    for (task, epsilon), panel in frame.groupby(["task", "epsilon"]):
        axis = axes[tasks.index(task), epsilons.index(epsilon)]
        for i, method in enumerate(methods):
            part = panel[panel["method"] == method]
            place = part["layer"] + (i - (len(methods) - 1) / 2) * width
            look = bar(colours[method], full=i == 0)
            axis.bar(place, part["share"], width, label=method, **look)
            mean, dash = (part["layer"] * part["share"]).sum(), ("--", ":")[i % 2]
            axis.axvline(mean, color=colours[method], linestyle=dash, linewidth=1.4)
        axis.grid(False, axis="x")
        axis.set(
            xlim=(0.4, n_layers + 0.6),
            xticks=sorted({1, *range(n_layers, 0, -max(1, n_layers // 4))}),
        )
        if task == tasks[0]:
            axis.set_title(f"ε = {epsilon:g}")
    for task, row in zip(tasks, axes):
        row[0].set_ylabel(f"{written(task)}\nshare of inputs")
    figure.supxlabel(f"exit layer (of {n_layers}); dashed, dotted: the means", fontsize="medium")
    figure.suptitle(title, fontsize="medium")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center")
    return figure
