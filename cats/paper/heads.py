"""Two recipes for early heads side by side: consistency by layer, layers at each ε, and what is
left to the oracle (notebook 42).
"""

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cats.paper.style import RECIPES, TARGET, epsilon_axis, looks, written
from cats.stats.table import ScoreTable
from cats.stats.trials import auroc, evaluate, oracle_exits, settled_exits

if TYPE_CHECKING:
    from cats.train.run import Run


def by_layer(tables: dict[tuple[str, str], ScoreTable]) -> pd.DataFrame:
    """Consistency, and AUROC of M_k and p max for it, of (pair, recipe): a row a layer."""
    rows = []
    for (pair, recipe), table in tables.items():
        consistent, meta = table.consistent, table.scores("meta")
        softmax = None if table.regression else table.scores("sm")
        for k in range(table.n_layers - 1):
            row = {"pair": pair, "recipe": recipe, "layer": k + 1}
            row["consistency"] = consistent[:, k].mean()
            row["auroc_meta"] = auroc(meta[:, k], consistent[:, k])
            row["auroc_sm"] = np.nan if softmax is None else auroc(softmax[:, k], consistent[:, k])
            rows.append(row)
    return pd.DataFrame(rows)


def layers(
    tables: dict[tuple[str, str], ScoreTable], epsilons: list[float], trials: int, seed: int = 0
) -> pd.DataFrame:
    """Layers and consistency of `first_exit` with the meta score at each ε, of (pair, recipe); for
    the last recipe of a pair also the oracle's and those of a clairvoyant who waits until the
    answer has settled.
    """
    rows, last = [], {pair: recipe for pair, recipe in tables}
    for (pair, recipe), table in tables.items():
        frame = evaluate(table, "first_exit", "meta", epsilons, trials, seed)
        means = frame.groupby("epsilon", sort=False)[["consistency", "layers"]].mean()
        spread = frame.groupby("epsilon", sort=False)["layers"].std()
        for epsilon in epsilons:
            about = {"pair": pair, "n_layers": table.n_layers, "epsilon": epsilon}
            found = means.loc[epsilon].to_dict() | {"layers_std": spread[epsilon]}
            rows.append(about | {"recipe": recipe} | found)
            for name, exits in (("settled", settled_exits), ("oracle", oracle_exits)):
                if recipe == last[pair]:
                    mean = exits(table.consistent, epsilon).mean()
                    rows.append(about | {"recipe": name, "layers": mean})
    return pd.DataFrame(rows)


def saved(frame: pd.DataFrame, ours: str = "distilled", base: str = "paper") -> pd.DataFrame:
    """The share of layers that one recipe saves against another: a row a pair, a column an ε."""
    wide = frame.pivot(index=["pair", "epsilon"], columns="recipe", values="layers")
    return (1 - wide[ours] / wide[base]).unstack("epsilon")


def draw(consistency: pd.DataFrame, used: pd.DataFrame) -> Figure:
    """Above consistency by layer, below layers against 1-ε: a column a pair, a colour a recipe, at
    most four pairs side by side.
    """
    pairs = list(dict.fromkeys(consistency["pair"]))
    tall = -(-len(pairs) // 4)
    wide = -(-len(pairs) // tall)  # rows of about one length
    size = (1.2 + 2.7 * wide, 5 * tall)
    figure, axes = plt.subplots(2 * tall, wide, figsize=size, squeeze=False, layout="constrained")
    panels = axes.reshape(tall, 2, wide).swapaxes(1, 2).reshape(-1, 2)  # above and below, by pair
    for axis in panels[len(pairs) :].flat:
        axis.axis("off")
    known = looks([*consistency["recipe"], *used["recipe"]], RECIPES)
    drawn = {n: dict(color=k.colour, marker=k.marker, markersize=4) for n, k in known.items()}
    for (above, below), pair in zip(panels, pairs):
        for recipe, part in consistency[consistency["pair"] == pair].groupby("recipe", sort=False):
            above.plot(part["layer"], part["consistency"], label=recipe, **drawn[recipe])
        last = consistency[consistency["pair"] == pair]["layer"].max()
        above.set(title=pair, xlabel="layer", ylim=(None, 1.01), xlim=(0.3, last + 0.7))
        for recipe, part in used[used["pair"] == pair].groupby("recipe", sort=False):
            stroke = ":" if recipe in ("settled", "oracle") else "-"
            line = drawn[recipe] | {"linestyle": stroke}
            below.plot(part["epsilon"], part["layers"], label=recipe, **line)
        below.set(xlabel=TARGET, ylim=(0, None))
        epsilon_axis(below, used["epsilon"])
    for axis, label in zip(axes[:, 0], ("agrees with F", "layers used") * tall):
        axis.set_ylabel(label)
    handles, labels = axes[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return figure


def title(task: str, backbone: str) -> str:
    """A pair as a reader knows it."""
    return f"{written(task)}, {written(backbone)}"


def ablation(
    run: "Run", name: str, epsilons: list[float], trials: int, seed: int = 0
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One change of the recipe at a time, on a run's validation split: the numbers, and the table a
    reader sees.
    """
    from cats.train.fit import find_recipe

    variants = {
        "labels, [CLS] (paper)": find_recipe("paper"),
        "F's prediction, [CLS]": find_recipe("paper", targets="prediction"),
        "F's softmax, [CLS]": find_recipe("paper", targets="softmax"),
        "labels, [CLS] and mean": find_recipe("paper", reads="cls+mean"),
        "F's softmax, [CLS] and mean": find_recipe("distilled", targets="softmax"),
        "F's prediction, [CLS] and mean (distilled)": find_recipe("distilled"),
    }
    parts = {(name, label): run.by(r).table("validation") for label, r in variants.items()}
    steps = layers(parts, epsilons, trials, seed)
    wide = steps.pivot(index="recipe", columns="epsilon", values="layers").loc[list(variants)]
    first = by_layer(parts).query("layer == 1").set_index("recipe")["consistency"]
    shown = wide[epsilons].map("{:.2f}".format).rename(columns="ε = {:g}".format)
    shown.insert(0, "layer 1 agrees", first.map("{:.3f}".format))
    return steps, shown.reset_index()
