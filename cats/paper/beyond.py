"""Numbers and pictures of the notebooks that go beyond the paper on its own ground: 40 (fewer
layers, confidence, few inputs) and 41 (the exact law).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from scipy import stats

from cats.paper import style
from cats.paper.store import Tables
from cats.stats import validity
from cats.stats.calibrators import METHODS, conformal_rank, exact, most_errors
from cats.stats.quantiles import Ints, calibration_size
from cats.stats.trials import evaluate, recalibrate

CONFIDENT = 500  # calibration inputs where confidence in one calibration is looked at


def _look(frame: pd.DataFrame) -> dict:
    """Colour and mark by method, for seaborn."""
    drawn = style.looks([*frame["method"], *METHODS])
    colours = {name: known.colour for name, known in drawn.items()}
    marks = {name: known.marker for name, known in drawn.items()}
    size = dict(markersize=5, markeredgewidth=0)
    return dict(hue="method", palette=colours, style="method", markers=marks, **size)


# --- 40 (a)


def saved(
    tables: Tables, measure: str, epsilons: Sequence[float], trials: int, seed: int
) -> pd.DataFrame:
    """Random trials of the three calibrators with one promise, and of the oracle."""
    methods = ["shared", "shared_all", "first_exit", "oracle"]
    frames = []
    for (task, backbone), table in tables.items():
        frame = evaluate(table, methods, [measure], epsilons, trials, seed)
        percent = 100 * frame["layers"] / table.n_layers
        frames.append(frame.assign(task=task, backbone=backbone, percent=percent))
    frame = pd.concat(frames, ignore_index=True)
    keys = ["task", "backbone", "epsilon", "trial"]
    single = frame.pivot(index=keys, columns="method", values="layers")
    assert (single["first_exit"] <= single["shared_all"]).all(), "first_exit leaves later"
    assert (single["shared_all"] <= single["shared"]).all(), "shared_all leaves later"
    return frame


def saved_figure(frame: pd.DataFrame) -> Figure:
    """Layers in per cent of F's against 1-ε, a panel a task and encoder."""
    drawn = style.looks(frame["method"])
    grid = sns.relplot(
        frame.replace(style.NAMES),
        x="epsilon",
        y="percent",
        row="backbone",
        col="task",
        kind="line",
        dashes={method: drawn[method].dash for method in frame["method"].unique()},
        errorbar=("pi", 68),
        height=2.1,
        aspect=1.2,
        **_look(frame),
    )
    for axis in grid.axes.flat:
        style.epsilon_axis(axis, frame["epsilon"])
    grid.set(ylim=(0, 102)).set_titles("{col_name}, {row_name}", size="medium")
    grid.set_axis_labels("", "layers (% of F's)")
    style.hide_empty(grid.axes)
    grid.figure.supxlabel(style.TARGET, fontsize="medium", y=0)
    sns.move_legend(grid, "lower center", bbox_to_anchor=(0.45, 1), ncols=4, title=None)
    return grid.figure


# --- 40 (b), (c)


def recalibrated(
    tables: Tables,
    n: int,
    settings: Sequence[tuple[str, float | None]],
    levels: Sequence[float],
    trials: int,
    seed: int,
    measure: str,
) -> pd.DataFrame:
    """`recalibrate` for every pair, layers and consistency in per cent."""
    frames = [
        recalibrate(table, n, settings, levels, trials, seed, measure).assign(
            pair=" ".join(pair), depth=table.n_layers
        )
        for pair, table in tables.items()
    ]
    frame = pd.concat(frames, ignore_index=True)
    layers = 100 * frame["layers"] / frame["depth"]
    return frame.assign(layers=layers, consistency=100 - 100 * frame["risk"])


def confidence(
    tables: Tables,
    deltas: Sequence[float],
    levels: Sequence[float],
    draws: int,
    seed: int,
    measure: str,
) -> pd.DataFrame:
    """How often the rest of a table errs too often after one calibration, and what it costs to
    make that rare; with the exact ceiling for `first_exit` and `pac`.

    The rest is a sample itself: if m errors among n are allowed, its uncovered inputs are
    BetaBinomial(rest, m+1, n-m).
    """
    n = CONFIDENT
    settings = [("first_exit", None), *((m, delta) for m in ("pac", "ltt") for delta in deltas)]
    frame = recalibrated(tables, n, settings, levels, draws, seed, measure)
    plain = frame["method"] == "first_exit"  # knows no delta: the same for each
    frame = pd.concat([*(frame[plain].assign(delta=delta) for delta in deltas), frame[~plain]])
    frame["above"] = 100.0 * (frame["risk"] > frame["epsilon"])
    keys = ["pair", "method", "epsilon", "delta"]
    cost = frame.groupby(keys, sort=False)[["above", "layers"]].mean().reset_index()
    rest = cost["pair"].map({" ".join(pair): len(table) - n for pair, table in tables.items()})
    allowed = [
        most_errors(n, e, d) if m == "pac" else n - conformal_rank(n, 1 - exact(e))
        for m, e, d in zip(cost["method"], cost["epsilon"], cost["delta"])
    ]
    cost["ceiling"] = [
        100 * stats.betabinom(r, m + 1, n - m).sf(int(exact(e) * r))
        for r, m, e in zip(rest, allowed, cost["epsilon"])
    ]
    cost.loc[cost["method"] == "ltt", "ceiling"] = np.nan  # it bounds another statistic
    return cost


def ceilings(cost: pd.DataFrame, draws: int, alarm: float) -> list[validity.Check]:
    """The exact ceilings as checks, `first_exit` once and not once a delta; all must hold."""
    bounded = cost.dropna().drop_duplicates(["pair", "method", "epsilon", "ceiling"])
    found = [
        validity.count_check(
            r.pair, "", round(r.above * draws / 100), draws, r.ceiling / 100, alarm, side="high"
        )
        for r in bounded.itertuples()
    ]
    assert all(check.ok for check in found), "a ceiling is broken"
    return found


def confidence_figure(cost: pd.DataFrame, draws: int) -> Figure:
    """Left: how often the rest errs too often, against δ. Right: what the promise costs.

    Lines are means over the pairs, bars 95 % intervals: left Clopper and Pearson's for all draws
    of all pairs, right Student's for the layers added to `first_exit`, pair by pair.
    """
    figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.3), layout="constrained")
    deltas, looks = sorted(set(cost["delta"])), style.looks(cost["method"])
    wide = cost.pivot(index=["epsilon", "delta", "pair"], columns="method", values="layers")
    added = wide.sub(wide["first_exit"], axis=0)
    for i, (epsilon, part) in enumerate(cost.groupby("epsilon")):
        for j, (method, look) in enumerate(looks.items()):
            at = part[part["method"] == method].groupby("delta")
            pairs, seen = at.size().iloc[0], at["above"].mean()
            counts, n = (seen * draws * pairs / 100).round(), draws * pairs
            low = np.nan_to_num(100 * stats.beta.ppf(0.025, counts, n - counts + 1))
            high = 100 * stats.beta.ppf(0.975, counts + 1, n - counts)
            more = added.loc[epsilon, method].groupby(level="delta")
            half = stats.t.ppf(0.975, max(pairs - 1, 1)) * more.sem().fillna(0)
            shift = 1.05 ** (j - 1 + 3 * (i - 0.5))  # side by side, so that bars can be told apart
            line = dict(color=look.colour, marker=look.marker, markersize=4, capsize=2)
            line |= dict(linestyle="-" if i == 0 else "--", label=f"{look.name}, ε = {epsilon:g}")
            gaps = [(seen - low).clip(lower=0), (high - seen).clip(lower=0)]
            axes[0].errorbar(seen.index * shift, seen, yerr=gaps, **line)
            if method != "first_exit":
                axes[1].errorbar(more.mean().index * shift, more.mean(), yerr=half, **line)
    axes[0].plot(deltas, 100 * np.array(deltas), color="black", linewidth=1.2, label="δ, promised")
    axes[0].set_yscale("symlog", linthresh=0.1, linscale=0.4)
    axes[0].set_yticks([0, 0.1, 1, 10, 50], ["0", "0.1", "1", "10", "50"])
    axes[0].set_yticks([], minor=True)
    axes[1].axhline(0, color=looks["first_exit"].colour, linewidth=1.5)
    names = ("calibrations with risk > ε (%)", "layers added to first_exit\n(points of F's layers)")
    for axis, name in zip(axes, names):
        axis.set(xscale="log", xlabel="δ", ylabel=name, ylim=(0, None))
        axis.set_xticks(deltas, deltas), axis.set_xticks([], minor=True), axis.invert_xaxis()
    axes[0].set_ylim(0, 60)
    axes[1].set_ylim(-0.4, None)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    return figure


SIZES = {
    "layers": "layers (% of F's)",
    "consistency": "consistency (%)",
    "shut": "trials with τ = ∞ (%)",
}


def few_inputs(
    tables: Tables,
    sizes: Sequence[int],
    levels: Sequence[float],
    draws: int,
    seed: int,
    measure: str,
    delta: float = 0.01,
) -> pd.DataFrame:
    """Calibrations on n inputs, for each n that every table has."""
    settings = [("shared", None), ("first_exit", None), ("pac", delta)]
    most = min(map(len, tables.values())) * 4 // 5
    frame = pd.concat(
        recalibrated(tables, n, settings, levels, draws, seed, measure) for n in sizes if n <= most
    )
    return frame.assign(shut=100.0 * np.isposinf(frame["threshold"]))


def few_means(frame: pd.DataFrame) -> pd.DataFrame:
    """Means of `few_inputs` by pair, method, ε and n."""
    keys = ["pair", "method", "epsilon", "n"]
    return frame.groupby(keys, sort=False)[list(SIZES)].mean().reset_index()


def few_figure(frame: pd.DataFrame) -> Figure:
    """Layers, consistency with its 5th to 95th percentile and those of the exact law, and how often
    nothing could be promised, against n.
    """
    sizes, levels = sorted(set(frame["n"])), sorted(set(frame["epsilon"]))
    shape = dict(figsize=(7, 6.6), sharex=True, sharey="row", height_ratios=[3, 3, 2])
    figure, axes = plt.subplots(3, len(levels), layout="constrained", **shape)
    for (row, column), axis in np.ndenumerate(axes):
        what, e = list(SIZES)[row], levels[column]
        sns.lineplot(
            frame[frame["epsilon"] == e],
            x="n",
            y=what,
            dashes=False,
            errorbar=("pi", 90) if what == "consistency" else None,
            ax=axis,
            legend=row + column == 0,
            **_look(frame),
        )
        axis.set(xscale="log", xlabel="calibration inputs n", ylabel=SIZES[what])
        axis.set_title(f"ε = {e}" if row == 0 else "")
        axis.set_xticks(sizes, sizes), axis.set_xticks([], minor=True)
        if what == "consistency":
            able = [n for n in sizes if n >= calibration_size(e)]
            law = [100 * validity.coverage_law(n, e).ppf([0.05, 0.95]) for n in able]
            axis.plot(able, law, color="black", linestyle="--", linewidth=0.8)
            axis.axhline(100 - 100 * e, color="black", linewidth=0.8)
    axes[0, 0].set_ylim(0, 103)
    sns.move_legend(axes[0, 0], "upper right", title=None, frameon=True)
    return figure


# --- 41


def law_counts(
    tables: Tables,
    measure: str,
    n: int,
    n_test: int,
    epsilon: float,
    splits: int,
    alarm: float,
    seed: int,
) -> tuple[dict[str, Ints], list[validity.Check], list[validity.Check]]:
    """Covered test inputs over random splits of each table, as they should be and in two broken
    ways: (counts by name, checks, controls).
    """
    ways: dict[str, dict[str, Any]] = {
        "": {},
        ": rank off by one": dict(quantile=validity.quantile_off_by_one),
        ": tested where calibrated": dict(seen=n),
    }
    seen: dict[str, Ints] = {}
    found: dict[str, list[validity.Check]] = {way: [] for way in ways}
    for i, (pair, table) in enumerate(tables.items()):
        name, values = " ".join(pair), validity.untied(table, measure, seed)
        for way, broken in ways.items():
            rng = np.random.default_rng([seed, i])
            counts = seen[name + way] = validity.covered_counts(
                values, n, n_test, epsilon, splits, rng, **broken
            )
            check = validity.covered_check(name + way, counts, n, n_test, epsilon, rng, alarm)
            found[way].append(check)
    checks = found.pop("")
    return seen, checks, [check for controls in found.values() for check in controls]


def law_data(
    tables: Tables, seen: Mapping[str, Ints], n: int, n_test: int, epsilon: float, splits: int
) -> pd.DataFrame:
    """The law, and what was seen of each table, by number of covered inputs."""
    law = validity.covered_law(n, n_test, epsilon).pmf(np.arange(n_test + 1))
    names = [" ".join(pair) for pair in tables]
    counts = {name: np.bincount(seen[name], minlength=n_test + 1) / splits for name in names}
    return pd.DataFrame({"covered": np.arange(n_test + 1), "law": law} | counts)


def law_figure(tables: Tables, data: pd.DataFrame) -> Figure:
    """Bars: what was seen; line: the law; a panel a table."""
    pairs = pd.DataFrame(list(tables), columns=["task", "backbone"])
    grid = sns.FacetGrid(pairs, row="backbone", col="task", height=2.1, xlim=(85, 100.3))
    n_test, colour = data["covered"].max(), style.METHODS["first_exit"].colour  # its V
    x = 100 * data["covered"] / n_test
    for (backbone, task), axis in grid.axes_dict.items():
        if f"{task} {backbone}" in data:
            seen = 100 * data[f"{task} {backbone}"]
            axis.bar(x, seen, width=100 / n_test, color=colour, alpha=0.5, linewidth=0)
            axis.plot(x, 100 * data["law"], color="black", linewidth=1)
        axis.set_title(f"{style.written(task)}, {style.written(backbone)}")
    grid.set_axis_labels("covered test inputs (%)", "splits (%)")
    style.hide_empty(grid.axes)
    return grid.figure


def law_table(
    checks: Sequence[validity.Check], controls: Sequence[validity.Check]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The checks and the controls as numbers, and as a reader sees them."""
    columns = ["claim", "seen", "high", "false_alarm", "verdict"]
    report = validity.as_frame([*checks, *controls])[columns]
    report.insert(1, "kind", ["law"] * len(checks) + ["control"] * len(controls))
    caught = ["NOT CAUGHT" if check.ok else "caught" for check in controls]
    report.loc[report["kind"] == "control", "verdict"] = caught
    forms = {"seen": "{:.4f}", "high": "{:.4f}", "false_alarm": "{:.0e}"}
    text = {column: report[column].map(form.format) for column, form in forms.items()}
    names = [style.pair_title(claim) for claim in report["claim"]]
    shown = report.assign(**text, claim=names)
    return report, shown.rename(columns={"false_alarm": "false alarm"})
