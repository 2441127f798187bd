"""Drawings from ScoreTables: one input's way through the layers (Figure 1), confidence layer by
layer (Figure 2), AUROC by layer.

In the first two colour is what a layer predicts: one a class, or a scale for regression. Inputs are
named by row and label, never by text.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from cats.paper.style import MEASURES, Look, coin, looks, stroke, written
from cats.stats.exits import exit_layers
from cats.stats.quantiles import Bools, Floats, Ints
from cats.stats.table import ScoreTable

# Okabe and Ito's
CLASSES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
# columns of Table 1: pdiff often lies on pmax, so it is small, and both are seen
FEATURES = {"pmax": "sm", "pdiff": "diff"}
SIZES = {"meta": 3, "pmax": 4.5, "pdiff": 2.5, "patience": 3}


def _line(measure: str, look: Look) -> dict[str, Any]:
    """How a measure's line by layer is drawn."""
    size = SIZES.get(measure, 3)
    line = dict(color=look.colour, marker=look.marker, markersize=size, linewidth=1)
    return line | stroke(look.dash) | {"label": look.name}


def say(
    table: ScoreTable, prediction: Any, names: Mapping[int, str] | Sequence[str] | None = ()
) -> str:
    """A prediction or label as text."""
    return (
        f"{prediction:.1f}"
        if table.regression
        else str(names[prediction] if names else f"class {prediction}")
    )


def whose(table: ScoreTable) -> str:
    """Task and model of a table, as they are written."""
    known = (table.metadata.get(name, "") for name in ("task", "backbone"))
    return ", ".join(map(written, filter(None, known))) or "table"


def paint(table: ScoreTable, row: int) -> tuple[list[Any], Any]:
    """The colours (l,) of what all layers predict for one input, and the scale they are on (None
    for classes).
    """
    predictions = table.predictions[row]
    if not table.regression:
        return [CLASSES[c % len(CLASSES)] for c in predictions], None
    scale = ScalarMappable(
        Normalize(table.predictions[:, -1].min(), table.predictions[:, -1].max()), "viridis"
    )
    return list(scale.to_rgba(predictions)), scale


def key(
    figure: Figure,
    axes: Any,
    table: ScoreTable,
    rows: Sequence[int],
    names: Any = (),
    extra: Any = (),
) -> None:
    """Right of the drawing, what the colours mean, and the marks in `extra`."""
    classes: Any = [] if table.regression else np.unique(table.predictions[rows])
    marks = [
        Line2D(
            [],
            [],
            marker="s",
            linestyle="",
            color=CLASSES[c % len(CLASSES)],
            label=say(table, c, names),
        )
        for c in classes
    ]
    if marks or extra:
        axes[0].legend(
            handles=[*marks, *extra], loc="upper left", bbox_to_anchor=(1.01, 1.05), borderaxespad=0
        )
    if table.regression:
        axis = axes[-1] if extra else axes[0]  # beside the legend, or in its place
        bar = axis.inset_axes([1.03, 0.6, 0.22, 0.07 if extra else 0.14])
        figure.colorbar(
            paint(table, rows[0])[1], cax=bar, orientation="horizontal", label="predicted value"
        )


def way_through(
    table: ScoreTable, row: int, thresholds: Floats, exit_layer: int, names: Any = ()
) -> Figure:
    """Figure 1: the layers as boxes, those after the exit empty; below them the confidences,
    hatched where a layer disagrees with F, and the threshold.
    """
    l, colours, scores = table.n_layers, paint(table, row)[0], table.scores()[row]
    figure, (boxes, bars) = plt.subplots(
        2, 1, figsize=(7.2, 3.1), sharex=True, height_ratios=(1, 2.2), layout="constrained"
    )
    for k in range(1, l + 1):
        look = (
            {"facecolor": colours[k - 1], "edgecolor": "black"}
            if k <= exit_layer
            else {"facecolor": "white", "edgecolor": "#999999", "linestyle": ":"}
        )
        boxes.add_patch(Rectangle((k - 0.42, 0), 0.84, 1, **look))
        dark = k <= exit_layer and np.dot(to_rgb(colours[k - 1]), (0.3, 0.6, 0.1)) < 0.6
        boxes.text(
            k, 0.45, k, ha="center", va="center", fontsize=8, color="white" if dark else "#555555"
        )
        if k < l:
            hatch = "" if table.consistent[row, k - 1] else "////"  # seen in grey, too
            bars.bar(k, scores[k - 1], 0.7, hatch=hatch, **look)
    boxes.text(0.58, 1.15, f"{exit_layer} of {l} layers run", va="bottom", fontsize=9)
    if exit_layer < l:
        boxes.text(
            l + 0.42,
            1.15,
            f"{l - exit_layer} layers not run: {100 * (1 - exit_layer / l):.0f} % of F",
            ha="right",
            va="bottom",
            fontsize=9,
            color="#666666",
        )
        side = "left" if exit_layer < l / 6 else "right" if exit_layer > 5 * l / 6 else "center"
        bars.text(
            exit_layer + {"left": -0.35, "right": 0.35}.get(side, 0),
            1.04,
            f"exit: {scores[exit_layer - 1]:.3f}",
            ha=side,
            va="bottom",
            fontsize=9,
        )
    bars.step(
        np.arange(1, l), thresholds, where="mid", color="black", linestyle="--", linewidth=1.2
    )
    if np.ptp(thresholds) == 0 and np.isfinite(thresholds[0]):
        bars.text(
            1.01,
            thresholds[0],
            f"threshold {thresholds[0]:.3f}",
            va="center",
            fontsize=9,
            transform=bars.get_yaxis_transform(),
        )
    label = say(table, np.asarray(table.labels)[row], names)
    boxes.set(ylim=(-0.1, 1.9), title=f"{whose(table)}, row {row}, label {label}")
    boxes.axis("off")
    bars.set(
        xlim=(0.3, l + 0.7),
        ylim=(0, 1.22),
        xlabel="layer k",
        ylabel="confidence $M_k$",
        xticks=range(1, l + 1, 1 if l < 16 else 2),
        yticks=(0, 0.5, 1),
    )
    bars.grid(False)
    key(figure, (boxes, bars), table, [row], names)
    return figure


def confidences(
    table: ScoreTable,
    rows: Mapping[str, int],
    thresholds: Floats,
    exit_layers: Ints,
    names: Any = (),
) -> Figure:
    """Figure 2: for each of these inputs (title to row) the meta confidence and the early
    prediction of every layer.
    """
    l, consistent, scores = table.n_layers, table.consistent, table.scores()
    figure, axes = plt.subplots(
        len(rows),
        1,
        figsize=(7.2, 2.0 * len(rows)),
        sharex=True,
        layout="constrained",
        squeeze=False,
    )
    for axis, (title, row) in zip(axes[:, 0], rows.items()):
        colours, layers = paint(table, row)[0], np.arange(1, l)
        axis.plot(layers, scores[row], color="#BBBBBB", linewidth=1, zorder=1)
        for k in layers:
            axis.scatter(
                k,
                scores[row, k - 1],
                color=colours[k - 1],
                marker="o" if consistent[row, k - 1] else "X",
                s=36,
                zorder=2,
            )
        axis.scatter(l, 1, color=colours[-1], marker="*", s=110, zorder=2, clip_on=False)
        axis.step(layers, thresholds, where="mid", color="black", linestyle="--", linewidth=1.2)
        axis.axvline(exit_layers[row], color="#555555", linestyle=":", linewidth=1.2)
        label = say(table, np.asarray(table.labels)[row], names)
        axis.set(
            title=f"{title}: row {row}, label {label}, leaves at layer {exit_layers[row]}",
            ylabel="confidence $M_k$",
            ylim=(-0.05, 1.08),
        )
    axis.set(xlabel="layer k", xlim=(0.4, l + 0.6), xticks=range(1, l + 1, 1 if l < 16 else 2))
    figure.suptitle(whose(table), fontsize="medium")
    marks = {"$F_k = F$": "o", "$F_k ≠ F$": "X", "F itself": "*"}
    extra = [
        Line2D([], [], marker=mark, linestyle="", color="#555555", label=label)
        for label, mark in marks.items()
    ]
    extra += [
        Line2D([], [], color="black", linestyle="--", linewidth=1.2, label="threshold"),
        Line2D([], [], color="#555555", linestyle=":", linewidth=1.2, label="exit"),
    ]
    key(figure, axes[:, 0], table, list(rows.values()), names, extra)
    return figure


def way_data(table: ScoreTable, row: int, exit_layer: int) -> pd.DataFrame:
    """The numbers behind `way_through`."""
    layers = np.arange(1, table.n_layers + 1)
    return pd.DataFrame(
        {
            "row": row,
            "layer": layers,
            "prediction": table.predictions[row],
            "confidence": [*table.scores()[row], np.nan],
            "run": layers <= exit_layer,
        }
    )


def easy_and_hard(table: ScoreTable, exits: Ints) -> dict[str, int]:
    """Two inputs that F gets right, not picked by hand: {"easy": row, "hard": row}.

    Easy: the first that leaves in the first quarter of the layers and on which all layers agree
    with F. Hard: the first that leaves in the last quarter and changes its prediction at least
    twice. Where there is none, the first that leaves in that quarter, else the first or last to
    leave.
    """
    first = lambda *rules: next(int(rule.argmax()) for rule in rules if rule.any())
    l, right = table.n_layers, table.correct[:, -1]
    changes = (~table.agree(table.predictions[:, 1:], table.predictions[:, :-1])).sum(axis=1)
    early, late = right & (exits <= l / 4), right & (exits > 3 * l / 4)
    return {
        "easy": first(early & table.consistent.all(axis=1), early, exits == exits.min()),
        "hard": first(late & (changes >= 2), late, exits == exits.max()),
    }


def confidences_data(table: ScoreTable, rows: Mapping[str, int]) -> pd.DataFrame:
    """The numbers behind `confidences`."""
    return pd.concat(
        pd.DataFrame(
            {
                "example": name,
                "row": i,
                "layer": range(1, table.n_layers),
                "prediction": table.predictions[i, :-1],
                "consistent": table.consistent[i],
                "confidence": table.scores()[i],
            }
        )
        for name, i in rows.items()
    )


def three_inputs(scores: Floats, consistent: Bools) -> Figure:
    """Three inputs layer by layer: the first on which all layers agree with F, and two others."""
    whole = consistent.all(axis=1)
    pick = [int(np.argmax(whole)), *np.flatnonzero(~whole)[:2]]
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.4), sharey=True, layout="constrained")
    layers = np.arange(1, scores.shape[1] + 1)
    for axis, i in zip(axes, pick):
        right = consistent[i]
        axis.plot(layers, scores[i], color="#999999", zorder=1)
        axis.scatter(layers[right], scores[i][right], color="#0072B2", label="$F_k = F$")
        crosses = dict(color="#D55E00", marker="X", label="$F_k ≠ F$")
        axis.scatter(layers[~right], scores[i][~right], **crosses)
        axis.set(title=f"input {i}", xlabel="layer k", ylim=(-0.05, 1.05))
    axes[0].set_ylabel("confidence $M_k(x)$")
    axes[1].legend(loc="lower right", frameon=True)
    return figure


def exits_by_epsilon(scores: Floats, thresholds: Mapping[float, Floats], n_layers: int) -> Figure:
    """The share of inputs that leave at each layer, a line an ε: {ε: thresholds} in."""
    figure, axis = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    for (epsilon, taus), colour in zip(
        thresholds.items(), cycle(("#56B4E9", "#0072B2", "#D55E00"))
    ):
        out = exit_layers(scores, taus)
        share = np.bincount(out, minlength=n_layers + 1)[1:] / len(out)
        look = dict(marker="o", markersize=4, color=colour, label=f"ε = {epsilon}")
        axis.plot(range(1, n_layers + 1), share, **look)
    axis.set(xlabel="exit layer", ylabel="share of inputs", ylim=(0, None))
    axis.legend()
    return figure


def auroc_by_layer(areas: pd.DataFrame) -> Figure:
    """One panel for each task and backbone of a frame with task, backbone, measure, layer and
    auroc; one line a measure.
    """
    panels = list(areas.groupby(["backbone", "task"], sort=False))
    wide = min(4, len(panels))
    tall = -(-len(panels) // wide)
    figure, axes = plt.subplots(
        tall,
        wide,
        figsize=(0.6 + 2.1 * max(wide, 2), 0.7 + 1.9 * tall),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    known = MEASURES | {feature: MEASURES[measure] for feature, measure in FEATURES.items()}
    lines = {name: _line(name, look) for name, look in looks(areas["measure"], known).items()}
    for axis, ((backbone, task), panel) in zip(axes.flat, panels):
        for measure, part in panel.groupby("measure", sort=False):
            axis.plot(part["layer"], part["auroc"], **lines[measure])
        coin(axis, label=axis is axes.flat[0])
        axis.set_title(f"{written(task)}\n{written(backbone)}")
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axis.set_xlim(0.3, panel["layer"].max() + 0.7)  # there is no layer 0
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    handles = [Line2D([], [], **line) for line in lines.values()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    figure.supxlabel("layer k", fontsize="medium")
    figure.supylabel("AUROC for $F_k = F$", fontsize="medium")
    return figure
