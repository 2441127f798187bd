"""Tables and pictures of the notebooks that train: 01 (tasks) to 05 (scores), and 33, 50 on what
comes out.
"""

from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from cats.paper import store, style
from cats.paper.figures import say, whose
from cats.stats.calibrators import calibrate
from cats.stats.exits import agreement, exit_layers
from cats.stats.table import TAU, ScoreTable
from cats.stats.trials import auroc, evaluate

if TYPE_CHECKING:
    from cats.train.run import Run

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"


def runs(recipes: list[str], **settings: Any) -> dict[str, "Run"]:
    """One run by recipe for early heads, of the same F; the first is the one that is shown."""
    whole = store.open_run(**settings)
    return {recipe: whole.by(recipe) for recipe in recipes}


def shade(difficulty: int) -> Any:
    """The colour of a difficulty from 1 to 5."""
    return plt.cm.viridis((difficulty - 1) / 4.5)


def difficulty(data: Any) -> np.ndarray | None:
    """The known difficulty of generated inputs; None for others."""
    return np.array(data["difficulty"][:]) if "difficulty" in data.column_names else None


# --- 01


def sizes(data: dict) -> pd.DataFrame:
    """Table 2: labels and rows of every split, a row a task."""
    from cats.train.tasks import find

    rows = []
    for name, splits in data.items():
        about = {"task": name, "labels": len(find(name).labels) or "regression"}
        rows.append(about | {split: len(part) for split, part in splits.items()})
    return pd.DataFrame(rows)


def examples(data: dict) -> str:
    """An easy and a hard input of each task, as a Markdown table."""
    from cats.train.tasks import find

    lines = ["| task | difficulty | text | label |", "|---|---|---|---|"]
    for name, splits in data.items():
        task, part = find(name), splits["train"]
        hard = part["difficulty"][:] if "difficulty" in part.column_names else [0] * len(part)
        for i in (hard.index(min(hard)), hard.index(max(hard))):
            label = part[i]["label"] if task.regression else task.labels[part[i]["label"]]
            text = " · ".join(part[i][column][:300] for column in task.columns)
            lines.append(f"| {name} | {hard[i] or ''} | {text} | {label} |")
    return "\n".join(lines)


def lengths_figure(data: dict, most: int = 3000) -> Figure:
    """Words (above) and labels (below) of the first training inputs, a column a task."""
    from cats.train.tasks import find

    size = (2.6 * len(data), 4.4)
    figure, axes = plt.subplots(2, len(data), figsize=size, layout="constrained", squeeze=False)
    for (above, below), (name, splits) in zip(axes.T, data.items()):
        task, part = find(name), splits["train"].select(range(min(most, len(splits["train"]))))
        texts = zip(*(part[column][:] for column in task.columns))
        words = [sum(len(text.split()) for text in both) for both in texts]
        short = max(words) < 60
        sns.histplot(words, ax=above, color=BLUE, discrete=short, bins="auto" if short else 40)
        above.set(title=style.written(name), xlabel="words", ylabel="")
        labels, classes = part["label"][:], range(len(task.labels))
        if task.regression:
            sns.histplot(labels, ax=below, color=ORANGE, bins=12)
        else:
            below.bar(classes, [labels.count(i) for i in classes], color=ORANGE)
            names = [label.lower() for label in task.labels]
            below.set_xticks(classes, names, rotation=25, ha="right", fontsize="small")
        below.set(xlabel="score" if task.regression else "", ylabel="")
    for axis in axes[:, 0]:
        axis.set_ylabel(f"inputs (of {most:,})")
    return figure


# --- 02


def loss_figure(log: pd.DataFrame, run: "Run") -> Figure:
    """The training loss by epoch."""
    figure, axis = plt.subplots(figsize=(5, 2.6), layout="constrained")
    axis.plot(log["epoch"], log["loss"], color=BLUE)
    axis.set(xlabel="epoch", ylabel="training loss", title=style.title(run.name), ylim=(0, None))
    return figure


def by_difficulty(run: "Run", predictions: np.ndarray, labels: np.ndarray) -> pd.DataFrame | None:
    """How often F is right on the validation split, by known difficulty."""
    hard = difficulty(run.data["validation"])
    if hard is None:
        return None
    regression = run.task.regression
    right = np.abs(predictions - labels) <= TAU if regression else predictions == labels
    name = "within 0.5 of the label" if regression else "accuracy"
    means = [right[hard == h].mean() for h in range(1, 6)]
    return pd.DataFrame({"difficulty": range(1, 6), name: means}).round(3)


# --- 03


def losses_figure(losses: Any, run: "Run") -> Figure:
    """The loss of each head in the first epoch and in the last."""
    figure, axis = plt.subplots(figsize=(5, 2.6), layout="constrained")
    layers = range(1, len(losses[0]) + 1)
    for epoch, colour in ((0, "#56B4E9"), (len(losses) - 1, BLUE)):
        look = dict(marker="o", markersize=4, color=colour, label=f"epoch {epoch + 1}")
        axis.plot(layers, losses[epoch], **look)
    axis.set(xlabel="layer", ylabel="training loss", title=style.title(run.name), ylim=(0, None))
    axis.legend()
    return figure


def layers_figure(
    report: pd.DataFrame, table: ScoreTable, run: "Run", recipes: list[str]
) -> Figure:
    """Left: consistency and performance by layer. Right: calibration error, or distance to F."""
    layers, metric = report["layer"], run.task.metric
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 2.9), layout="constrained")
    for recipe, seen in style.looks(["paper", *recipes], style.RECIPES).items():
        shown = f"consistency, {recipe}" if recipe in recipes else "consistency"
        look = dict(marker=seen.marker, color=seen.colour)
        left.plot(layers, report[shown], label=f"agrees with F, {seen.name}", **look)
    left.plot(layers, report[metric], marker="^", ls="--", color=GREY, label=f"{metric}, paper")
    left.set(xlabel="layer", title=style.title(run.name), ylim=(0, 1.02))
    left.set_ylabel(f"agreement, {metric}")
    left.legend(loc="lower right")
    if run.task.regression:
        far = np.abs(table.predictions[:, :-1] - table.predictions[:, -1:]).mean(axis=0)
        right.plot(layers, far, marker="o", color=BLUE)
        right.set(xlabel="layer", title="mean distance to F", ylim=(0, None))
        return figure
    right.plot(layers, report["ece_before"], marker="s", ls="--", color=GREY, label="before")
    right.plot(layers, report["ece"], marker="o", color=BLUE, label="after temperature")
    right.set(xlabel="layer", title="expected calibration error", ylim=(0, None))
    right.legend()
    return figure


def difficulty_figure(table: ScoreTable, hard: np.ndarray, run: "Run") -> Figure:
    """Consistency by layer, a curve a difficulty."""
    figure, axis = plt.subplots(figsize=(5, 2.9), layout="constrained")
    for h in range(1, 6):
        curve = table.consistent[hard == h].mean(axis=0)
        look = dict(marker="o", markersize=4, color=shade(h), label=h)
        axis.plot(range(1, table.n_layers), curve, **look)
    axis.set(xlabel="layer", ylabel="agrees with F", title=style.title(run.name), ylim=(0, 1.02))
    axis.legend(title="difficulty", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


# --- 04


def auroc_figure(report: pd.DataFrame, run: "Run") -> Figure:
    """AUROC of the meta score and of p max by layer, from a coin (0.5) to perfect (1)."""
    figure, axis = plt.subplots(figsize=(5, 2.9), layout="constrained")
    for name, words in {"meta": "meta score", "sm": "p max"}.items():
        if f"auroc_{name}" in report:
            look = style.MEASURES[name]
            line = dict(marker=look.marker, color=look.colour, label=words)
            axis.plot(report["layer"], report[f"auroc_{name}"], **line, **style.stroke(look.dash))
    style.coin(axis)
    axis.set(xlabel="layer", ylabel="AUROC", title=style.title(run.name), ylim=(0.45, 1.02))
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 0.12), ncols=2)
    return figure


def scores_figure(table: ScoreTable) -> Figure:
    """Meta scores of inputs on which a layer agrees with F and of the others: first, middle and
    last layer, side by side (stacked on a logarithmic axis they would show neither share).
    """
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.4), layout="constrained", sharey=True)
    for axis, k in zip(axes, (1, table.n_layers // 2, table.n_layers - 1)):
        agrees, m = table.consistent[:, k - 1], np.asarray(table.meta)[:, k - 1]
        names = ["$F_k = F$", "$F_k ≠ F$"]
        _, _, (pale, full) = axis.hist([m[agrees], m[~agrees]], 20, range=(0, 1), label=names)
        for bars, look in ((pale, style.bar(BLUE, full=False)), (full, style.bar(ORANGE))):
            plt.setp(bars, **look)
        axis.set(title=f"layer {k}", xlabel="meta score", yscale="log")
    axes[0].set_ylabel("inputs")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    figure.suptitle(whose(table), fontsize="medium")
    return figure


def worth_row(name: str, table: ScoreTable, measure: str = "meta", seed: int = 0) -> dict:
    """Mean AUROC over layers, and layers of `first_exit` at ε = 0.05."""
    frame = evaluate(table, "first_exit", measure, 0.05, seed=seed)
    scores, consistent = table.scores(measure), table.consistent
    areas = [auroc(scores[:, k], consistent[:, k]) for k in range(table.n_layers - 1)]
    layers = frame["layers"].mean()
    return {"features": name, "mean AUROC": np.nanmean(areas), "layers": layers}


def worth(run: "Run", table: ScoreTable, seed: int = 0, ablation: bool = True) -> pd.DataFrame:
    """Table 1's worth: meta classifiers trained once more without each feature, and p max alone."""
    from cats.model.exits import sizes as feature_sizes
    from cats.train.fit import fit_meta

    rows, meta = [worth_row("all", table, seed=seed)], run.meta
    used = feature_sizes(meta.early, meta.d_e, meta.n_outputs, meta.odds)
    for feature in [name for name, size in used.items() if size and ablation]:
        settings = run.meta_options | {"drop": [feature]}
        without, _ = fit_meta(run.heads, run.states("meta"), tau=TAU, seed=seed, **settings)
        rows.append(worth_row(f"without {feature}", run.scored("validation", without), seed=seed))
    if not run.task.regression:
        rows.append(worth_row("p max alone", table, "sm", seed))
    return pd.DataFrame(rows)


# --- 05


def first_cat(
    tables: dict[str, ScoreTable], epsilon: float
) -> tuple[pd.DataFrame, dict[tuple[str, str], np.ndarray]]:
    """What two calibrators promise and do, calibrated on validation and leaving on test; and their
    exits by (method, measure).
    """
    validation, test = tables["validation"], tables["test"]
    rows, exits = [], {}
    for measure in ["meta"] if test.regression else ["meta", "sm"]:
        for method in ("shared", "first_exit"):
            taus = calibrate(
                validation.scores(measure), validation.consistent, epsilon, method=method
            )
            out = exits[method, measure] = exit_layers(test.scores(measure), taus)
            agrees = agreement(test.consistent, out)
            row = {"method": method, "measure": measure, "promised": 1 - epsilon}
            rows.append(row | {"consistency": agrees.mean(), "layers": out.mean()})
    return pd.DataFrame(rows), exits


def exits_by_difficulty(exits: np.ndarray, hard: np.ndarray, n_layers: int) -> pd.DataFrame:
    """How many inputs of each difficulty leave at each layer."""
    layers, kinds = range(1, n_layers + 1), sorted(set(hard))
    counts = [[(exits[hard == h] == k).sum() for k in layers] for h in kinds]
    return pd.DataFrame(counts, kinds, layers).rename_axis("difficulty").reset_index()


def exits_figure(counts: pd.DataFrame, name: str) -> Figure:
    """Where inputs leave, coloured by difficulty, and the mean exit layer of each."""
    counts = counts.set_index("difficulty")
    layers, kinds = counts.columns.to_numpy(int), list(counts.index)
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 2.9), layout="constrained")
    below = np.zeros(len(layers))
    for h in kinds:
        axes[0].bar(layers, counts.loc[h], bottom=below, color=shade(h), label=h)
        below += counts.loc[h].to_numpy()
    axes[0].set(xlabel="exit layer", ylabel="inputs", title=name)
    if len(kinds) > 1:
        axes[0].legend(title="difficulty")
    means = counts.mul(layers).sum(axis=1) / counts.sum(axis=1)
    axes[1].plot(kinds, means, marker="o", color=ORANGE)
    axes[1].set(xlabel="difficulty", ylabel="mean exit layer", ylim=(0, max(layers)), xticks=kinds)
    return figure


# --- 33, 50


def bands(run: "Run", test: ScoreTable, exits: np.ndarray) -> tuple[pd.DataFrame, np.ndarray]:
    """Inputs by quarter of the layers at which they leave, a row a quarter; and each one's
    quarter.
    """
    l, n = test.n_layers, len(test)
    edges = [(k * l // 4 + 1, (k + 1) * l // 4) for k in range(4)]
    band = np.searchsorted([b for _, b in edges], exits)
    F, G = test.predictions[:, -1], test.predictions[np.arange(n), exits - 1]
    words = [len(text.split()) for text in texts(run)]
    hard = difficulty(run.data["test"])
    facts = pd.DataFrame(
        {
            "band": band,
            "agrees": test.agree(G, F),
            "F is right": test.correct[:, -1],
            "words": words,
        }
        | ({} if hard is None else {"difficulty": hard})
    )
    found = facts.groupby("band").mean().reindex(range(4))
    found.insert(0, "inputs", np.bincount(band, minlength=4))
    found.insert(0, "exit layer", [f"{a} to {b}" if a < b else f"{a}" for a, b in edges])
    return found, band


def texts(run: "Run") -> list[str]:
    """The texts of a run's test split, pairs with a stroke between."""
    data = run.data["test"]
    return [" / ".join(parts) for parts in zip(*(data[column][:] for column in run.task.columns))]


def picked(
    run: "Run", test: ScoreTable, exits: np.ndarray, band: np.ndarray, each: int, width: int
) -> tuple[pd.DataFrame, list[str]]:
    """Table D.1: the first inputs of each quarter, in the order of their exits; and their texts,
    at most `width` characters each.
    """
    pick = np.concatenate([np.flatnonzero(band == b)[:each] for b in range(4)])
    pick = pick[np.argsort(exits[pick], kind="stable")]
    F, G = test.predictions[:, -1], test.predictions[np.arange(len(test)), exits - 1]
    word = lambda values: [say(test, value, run.task.labels) for value in values[pick]]
    hard, text = difficulty(run.data["test"]), texts(run)
    found = pd.DataFrame(
        {
            "exit layer": exits[pick],
            "row": pick,
            "label": word(test.labels),
            "F": word(F),
            "G": word(G),
        }
        | ({} if hard is None else {"difficulty": hard[pick]})
    )
    short = lambda t: t if len(t) <= width else t[:width].rsplit(" ", 1)[0] + " [...]"
    return found, [short(text[i]) for i in pick]


def held_out_figure(exits: np.ndarray, n_layers: int, epsilon: float) -> Figure:
    """Where held-out texts leave."""
    figure, axis = plt.subplots(figsize=(5, 2.6), layout="constrained")
    counts = np.bincount(exits, minlength=n_layers + 1)[1:]
    axis.bar(range(1, n_layers + 1), counts, color=ORANGE)
    axis.set(xlabel="exit layer", ylabel="held-out texts", title=f"ε = {epsilon}")
    return figure
