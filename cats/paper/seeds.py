"""How much of a difference is the seed: pairs with ScoreTables of more than one, beside what
recipes differ by (notebook 42).

A seed is another F, with heads and meta classifiers of its own.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from cats.paper import store, style
from cats.stats.table import ScoreTable
from cats.stats.trials import evaluate

Seeded = dict[tuple[str, str, int], ScoreTable]  # by pair as it is written, recipe and seed
CASE = ["pair", "epsilon"]


def tables(recipes: Iterable[str], folder: str | Path = store.FOLDER) -> Seeded:
    """The test tables of every pair that has more than one seed; none where no pair has."""
    found: Seeded = {}
    for task, backbone in store.pairs(folder):
        pair = f"{style.written(task)}, {style.written(backbone)}"
        there = {recipe: store.seeds(task, backbone, recipe, folder) for recipe in recipes}
        for recipe, seeds in there.items():
            for seed in seeds if len(seeds) > 1 else []:
                given = (task, backbone, "test", folder, recipe, seed)
                found[pair, recipe, seed] = store.table(*given)
    return found


def layers(found: Seeded, epsilons: Sequence[float], trials: int, seed: int = 0) -> pd.DataFrame:
    """Mean consistency and layers of `first_exit` with the meta score: a row a pair, recipe, seed
    and ε.
    """
    parts = []
    for (pair, recipe, of), table in found.items():
        frame = evaluate(table, "first_exit", "meta", list(epsilons), trials, seed)
        means = frame.groupby("epsilon", sort=False)[["consistency", "layers"]].mean().reset_index()
        parts.append(means.assign(pair=pair, recipe=recipe, seed=of))
    columns = ["pair", "recipe", "seed", "epsilon", "consistency", "layers"]
    return pd.concat(parts, ignore_index=True)[columns]


def compared(frame: pd.DataFrame) -> pd.DataFrame:
    """What seeds and recipes differ by in layers, a row a pair and ε.

    seeds     the largest range over the seeds of one recipe
    recipes   the first recipe's mean over its seeds minus the last one's; NaN where there is one
    """
    groups = frame.groupby([*CASE, "recipe"], sort=False)["layers"]
    ranges = (groups.max() - groups.min()).groupby(CASE, sort=False).max()
    means = groups.mean().groupby(CASE, sort=False)
    apart = (means.first() - means.last()).where(means.size() > 1)
    return pd.DataFrame({"seeds": ranges, "recipes": apart})


def shown(frame: pd.DataFrame) -> pd.DataFrame:
    """The table a reader sees: layers seed by seed, and beside them both differences."""
    both, rows = compared(frame), []
    for (pair, epsilon), part in frame.groupby(CASE, sort=False):
        row = {"pair": pair, "1 − ε": f"{100 * (1 - epsilon):g} %"}
        for recipe, runs in part.groupby("recipe", sort=False):
            row[f"layers, {recipe}"] = ", ".join(map("{:.2f}".format, runs["layers"]))
        row["range of seeds"] = f"{both.loc[(pair, epsilon), 'seeds']:.2f}"
        apart = both.loc[(pair, epsilon), "recipes"]
        row["between recipes"] = f"{apart:.2f}" if apart == apart else ""
        low, high = (f"{100 * bound:.1f}" for bound in part["consistency"].agg(["min", "max"]))
        rows.append(row | {"consistent, %": low if low == high else f"{low} to {high}"})
    return pd.DataFrame(rows).fillna("")


def draw(frame: pd.DataFrame) -> Figure:
    """Layers against 1-ε, a panel a pair, a mark a seed, a line from the lowest to the highest."""
    pairs = list(dict.fromkeys(frame["pair"]))
    size = (1.2 + 2.6 * len(pairs), 2.9)
    figure, axes = plt.subplots(1, len(pairs), figsize=size, squeeze=False, layout="constrained")
    known = style.looks(frame["recipe"], style.RECIPES)
    for axis, pair in zip(axes[0], pairs):
        for recipe, part in frame[frame["pair"] == pair].groupby("recipe", sort=False):
            look = known[recipe]
            ends = part.groupby("epsilon")["layers"].agg(["min", "max"])
            axis.vlines(ends.index, ends["min"], ends["max"], color=look.colour, linewidth=4)
            marks = dict(marker=look.marker, color=look.colour, facecolor="white", zorder=3)
            axis.scatter(part["epsilon"], part["layers"], s=28, label=look.name, **marks)
        style.epsilon_axis(axis, frame["epsilon"])
        low, high = min(frame["epsilon"]), max(frame["epsilon"])
        axis.set(title=pair, xlim=(1.25 * high, low / 1.25), ylim=(0, None))
    axes[0, 0].set_ylabel("layers used")
    figure.supxlabel(style.TARGET, fontsize="medium")
    handles = dict(zip(*axes[0, 0].get_legend_handles_labels()[::-1]))
    figure.legend(handles.values(), handles.keys(), loc="outside right center")
    return figure
