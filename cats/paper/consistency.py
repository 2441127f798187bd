"""Numbers of the notebooks that sweep ε: 22 (Figures 3, 4), 24 (Figures 5, C.1) and 32 (Figures
C.2, C.3).
"""

import warnings
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cats import CalibrationWarning
from cats.paper import style
from cats.paper.places import DATA
from cats.paper.report import PAPER_LAYERS
from cats.stats.calibrators import calibrate
from cats.stats.exits import agreement, exit_layers
from cats.stats.table import ScoreTable
from cats.stats.trials import evaluate


def sweep(
    tables: Mapping, methods: list[str], epsilons: list[float], trials: int, seed: int = 0
) -> tuple[pd.DataFrame, list[str]]:
    """Random trials of each table, and what calibrators said that are short of inputs.

    tables   by task, or by (task, backbone); a regression has no softmax, so it has meta alone
    """
    frames = []
    with warnings.catch_warnings(record=True, action="always") as caught:
        for key, table in tables.items():
            measures = ["meta"] if table.regression else ["sm", "meta"]
            frame = evaluate(table, methods, measures, epsilons, trials, seed)
            if isinstance(key, str):
                frames.append(frame.assign(task=key))
                continue
            share = frame["layers"] / table.n_layers
            frames.append(frame.assign(task=key[0], backbone=key[1], share=share))
    short = [str(w.message) for w in caught if issubclass(w.category, CalibrationWarning)]
    return pd.concat(frames, ignore_index=True), short


def encoder_figure(frame: pd.DataFrame, backbone: str, tables: Mapping, what: str) -> Figure:
    """Figure 3's layout for one encoder of a sweep, whose name and depth stand in the title."""
    depth = next(table.n_layers for (_, name), table in tables.items() if name == backbone)
    title = f"{style.written(backbone)}, {depth} layers, {what}"
    part = frame[frame["backbone"] == backbone]
    return style.consistency_and_layers(part, depth, title, by="task", style="measure")


def beside_paper(frame: pd.DataFrame, n_layers: int) -> pd.DataFrame:
    """Our means beside the points of Figure 3 that the paper prints (Table C.2), and Table 4's for
    Figure 4; consistency in per cent, layers as a share of all.
    """
    keys = ["task", "method", "measure", "epsilon"]
    mean = frame.groupby(keys, sort=False)[["consistency", "layers"]].mean().reset_index()
    dev = pd.read_csv(DATA / "paper/tableC2_measures_dev.csv").assign(method="shared")
    test = pd.read_csv(DATA / "paper/table4_regression_test.csv")
    named = test["method"].str.extract(r"(\w+)/?(\w*)")
    test[["method", "measure"]] = named.replace("", "meta")  # static has no measure
    printed = pd.concat([dev, test]).assign(epsilon=lambda f: (1 - f["target"]).round(6))
    both = mean.merge(printed, on=keys, suffixes=("", "_paper"))
    both["consistency"] *= 100
    both["share"] = 100 * both["layers"] / n_layers
    both["share_paper"] = 100 * both["layers_paper"] / PAPER_LAYERS
    shown = ["consistency", "consistency_paper", "share", "share_paper"]
    return both[["task", "method", "measure", "target", *shown]]


def exit_counts(
    tables: dict[str, tuple[ScoreTable, ScoreTable]], methods: list[str], epsilons: list[float]
) -> pd.DataFrame:
    """The share of test inputs that leave at each layer, calibrated on validation: {task:
    (validation, test)} in.
    """
    rows = []
    for task, (validation, test) in tables.items():
        for method in methods:
            for epsilon in epsilons:
                taus = calibrate(
                    validation.scores("meta"), validation.consistent, epsilon, method=method
                )
                exits = exit_layers(test.scores("meta"), taus)
                share = np.bincount(exits, minlength=test.n_layers + 1)[1:] / len(test)
                agrees = agreement(test.consistent, exits).mean()
                rows += [
                    (task, method, epsilon, k + 1, s, agrees, len(validation), len(test))
                    for k, s in enumerate(share)
                ]
    columns = ["task", "method", "epsilon", "layer", "share", "consistency", "validation", "test"]
    return pd.DataFrame(rows, columns=columns)


def exit_means(frame: pd.DataFrame, n_layers: int) -> pd.DataFrame:
    """Mean exits of `exit_counts`; `half` leave in the first half of the layers, `last` at the
    end.
    """
    keys = ["task", "method", "epsilon"]
    groups = frame.assign(layers=frame["layer"] * frame["share"]).groupby(keys, sort=False)
    same = {name: (name, "first") for name in ("consistency", "validation", "test")}
    table = groups.agg(layers=("layers", "sum"), **same).reset_index()
    first_half = frame[frame["layer"] <= n_layers // 2].groupby(keys, sort=False)["share"].sum()
    table["half"] = first_half.to_numpy()
    table["last"] = frame.loc[frame["layer"] == n_layers, "share"].to_numpy()
    return table


def trends(frame: pd.DataFrame, epsilons: list[float]) -> pd.DataFrame:
    """The paper's trends by encoder: how far a promised mean falls short at most (points), how
    often `shared` beats `independent`, what share of layers meta saves over p max at ε near 0.05.
    """
    keys = ["backbone", "task", "measure", "epsilon", "method"]
    mean = frame.groupby(keys, sort=False)[["consistency", "share"]].mean().unstack("method")
    near = min(epsilons, key=lambda e: abs(e - 0.05))
    promised = [m for m in ("independent", "shared", "first_exit") if m in mean["consistency"]]
    target = 1 - mean.index.get_level_values("epsilon").to_numpy()[:, None]
    below = (target - mean["consistency"][promised]).max(axis=1)  # means of trials have noise, too
    shared = mean["share"]["shared"].unstack("measure").reindex(columns=["sm", "meta"])
    saved = (shared["sm"] - shared["meta"]).xs(near, level="epsilon")
    fewer = mean["share"]["shared"] < mean["share"]["independent"]
    found = {
        "largest shortfall, points": (100 * below).groupby("backbone").max().clip(lower=0),
        "shared below independent": fewer.groupby("backbone").mean(),
        "Meta saves over SM": saved.groupby("backbone").mean(),
    }
    return pd.DataFrame(found).reset_index()
