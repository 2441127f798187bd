"""One look for all figures, and one way to save them: PNG, the numbers beside it as CSV, and how
both were made.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import cycle
from typing import NamedTuple

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from IPython.display import Markdown

from cats._io import versions, write_json, writing
from cats.paper.places import FIGURES, announce
from cats.stats.trials import summary

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
    "meta": Look("Meta", "#D55E00", "o"),
    "sm": Look("SM", "#0072B2", "s", DASHED),
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
    free = zip(cycle(OTHERS), cycle(MARKS), cycle(STROKES))
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
    task, model, seed = re.fullmatch(r"(\w+)-(.+)-(\d+)", run).groups()
    return ", ".join([written(task), written(model)] + [f"seed {seed}"] * (seed != "0"))


def use_style():
    """The shared look: call it once at the top of a notebook."""
    sns.set_theme(
        context="paper",
        style="whitegrid",
        rc={
            "figure.dpi": 110,
            "savefig.dpi": 200,
            "pdf.fonttype": 42,  # letters stay letters: journals refuse Type 3
            "axes.titlesize": "medium",
            "legend.frameon": False,
            "lines.linewidth": 1.6,
        },
    )


def save(name, figure=None, data=None, parameters=None, inputs=None, measured=None):
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
    for kind, metadata in undated.items() if figure is not None else ():
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


def save_table(name, data, shown=None, grey=(), parameters=None, inputs=None, measured=None):
    """Write figures/NAME.csv (the numbers), .md and .tex (booktabs; as shown) and .json; returns
    the table to look at.

    data   a tidy frame of numbers
    shown  the frame a reader sees, its cells formatted already; by default `data` itself
    grey   positions of the rows that promise nothing
    """
    shown = (data if shown is None else shown).reset_index(drop=True)
    grey = set(grey)
    paint = lambda row: ["color: gray" if row.name in grey else ""] * len(row)
    look = lambda: shown.style.hide(axis="index").apply(paint, axis=1)  # a Styler changes in place
    with writing(FIGURES / f"{name}.md") as path:
        path.write_text(shown.to_markdown(index=False, disable_numparse=True) + "\n")
    with writing(FIGURES / f"{name}.tex") as path:
        latex = look().format(escape="latex").format_index(escape="latex", axis=1)
        path.write_text(
            latex.to_latex(hrules=True, convert_css=True, column_format="l" * len(shown.columns))
        )
    save(name, data=data, parameters=parameters, inputs=inputs, measured=measured)
    return look()


def save_reading(name, text):
    """Write figures/NAME.md, a reading in seconds, which is kept with its numbers; returns it to
    look at.
    """
    with writing(FIGURES / f"{name}.md") as path:
        path.write_text(text + "\n")
    return Markdown(text)


def consistency_and_layers(frame, n_layers=None, title="", by=None, style="method"):
    """Figure 3's layout: consistency above, layers below, against 1-epsilon; 16th to 84th
    percentile shaded.

    # one table, dashes where nothing is promised; one column a task, dashes for p max
    consistency_and_layers(frame, 24)
    consistency_and_layers(frame, 24, by="task", style="measure")

    frame     what `cats.evaluate` returns, more columns allowed
    n_layers  of the full model; None: the column `share`, of layers used, is drawn in place of
              `layers`
    by        the column whose values get a column of panels each
    style     the column line styles tell apart; colours tell methods apart
    """
    frame = frame.assign(target=1 - frame["epsilon"])
    if style == "measure":  # static has no measure: one line is enough, and it is drawn through
        frame = frame[
            (frame["method"] != "static")
            | (frame["measure"] == next(iter(_dashes("measure", frame["measure"]))))
        ]
    groups = dict(list(frame.groupby(by, sort=False))) if by else {"": frame}
    cost = "share" if n_layers is None else "layers"
    colours, dashes = palette(frame["method"]), _dashes(style, frame[style])
    size = (2.5 * len(groups) + 1.3, 5.0) if by else (4.6, 6.4)
    figure, axes = plt.subplots(
        2, len(groups), figsize=size, sharex=True, sharey="row", squeeze=False, layout="constrained"
    )
    for pair, (name, part) in zip(axes.T, groups.items()):
        for axis, column in zip(pair, ("consistency", cost)):
            sns.lineplot(
                part,
                x="target",
                y=column,
                hue="method",
                style=style,
                hue_order=list(colours),
                style_order=list(dashes),
                palette=colours,
                dashes=dashes,
                errorbar=("pi", 68),
                ax=axis,
                legend=axis is axes[0, 0],
            )
            axis.set(xlabel="", ylabel="")
        pair[0].axline((0.5, 0.5), slope=1, color="black", linewidth=0.8)
        pair[0].set_title(written(name))
    low, high = frame["target"].min(), frame["target"].max()
    axes[0, 0].set(
        ylabel="consistency  P(G = F)",
        xlim=(low, high),
        ylim=(min(low, frame["consistency"].quantile(0.01)) - 0.02, 1.005),
    )
    top = 1 if n_layers is None else n_layers
    axes[1, 0].set(
        ylabel="share of layers used" if n_layers is None else f"layers used (of {n_layers})",
        ylim=(0, top * 1.02),
    )
    figure.supxlabel("target  1 − ε", fontsize="medium")
    figure.suptitle(title, fontsize="medium")
    _legend_outside(figure, axes[0, 0], {"method", "measure", "backbone", style})
    return figure


def _dashes(column, values):
    """Dashes by value of a column; methods that promise epsilon are drawn through."""
    known = {"method": METHODS, "measure": MEASURES, "backbone": MODELS}.get(column, {})
    return {value: look.dash for value, look in looks(values, known).items()}


def _legend_outside(figure, axis, headings=()):
    """Move an axis' legend to the right of all panels, its headings in bold."""
    handles, labels = axis.get_legend_handles_labels()
    axis.get_legend().remove()
    legend = figure.legend(
        handles, [written(label) for label in labels], loc="outside right center"
    )
    for text in legend.get_texts():
        text.set_fontweight("bold" if text.get_text() in headings else "normal")


def numbers(frame, by="task"):
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


def exit_histograms(frame, n_layers, title=""):
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
            axis.bar(place, part["share"], width, color=colours[method], linewidth=0, label=method)
            axis.axvline(
                (part["layer"] * part["share"]).sum(),
                color=colours[method],
                linestyle="--",
                linewidth=1.2,
            )
        axis.grid(False, axis="x")
        axis.set(
            xlim=(0.4, n_layers + 0.6),
            xticks=sorted({1, *range(n_layers, 0, -max(1, n_layers // 4))}),
        )
        if task == tasks[0]:
            axis.set_title(f"ε = {epsilon:g}")
    for task, row in zip(tasks, axes):
        row[0].set_ylabel(f"{written(task)}\nshare of inputs")
    figure.supxlabel(f"exit layer (of {n_layers}); dashed: the mean", fontsize="medium")
    figure.suptitle(title, fontsize="medium")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center")
    return figure
