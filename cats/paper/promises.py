"""Pictures and readings of the notebooks on promises: 11 (theorems), 43 (choosing), 44 (losses and
groups).
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from scipy.stats import norm

from cats.paper import style
from cats.stats import choosing, validity

WIDE = norm.isf(0.005)  # 99 % intervals over trials


# --- 11


def coverage_figure(covered, n, epsilon):
    """The true coverage of many calibrations against its Beta law, and each through its own law.

    covered   {method: (coverages, the same made uniform)} as `validity.coverages` gives them
    """
    figure, axes = plt.subplots(
        1, 3, figsize=(10, 3), layout="constrained", width_ratios=[1, 1, 1.1]
    )
    grid, law = np.linspace(0.75, 1, 400), validity.coverage_law(n, epsilon)
    name = "Beta({}, {})".format(*law.args)
    for axis, method in zip(axes, list(covered)[1:]):
        look = dict(color=style.METHODS[method].colour, alpha=0.5, label="seen")
        axis.hist(covered[method][0], bins=60, range=(0.75, 1), density=True, **look)
        axis.plot(grid, law.pdf(grid), color="black", label=name)
        axis.axvline(1 - epsilon, color="black", linestyle=":", label="1 − ε")
        axis.set(title=f"{method}, n={n}, ε={epsilon}", xlabel="true coverage  P(V ≤ τ)")
        axis.set_ylabel("density")
        axis.legend(loc="upper left")
    for method, (_, uniform) in covered.items():
        steps = (np.arange(len(uniform)) + 0.5) / len(uniform)
        axes[2].plot(steps, np.sort(uniform), color=style.METHODS[method].colour, label=method)
    axes[2].axline((0, 0), slope=1, color="black", linewidth=0.8)
    axes[2].set(
        title="coverage through its own law", xlabel="expected", ylabel="seen", aspect="equal"
    )
    axes[2].legend()
    return figure


def coverage_data(covered):
    """The numbers behind `coverage_figure`, a column a method and kind."""
    kinds = ("coverage", "uniform")
    return pd.DataFrame(
        {f"{m} {kind}": covered[m][i] for m in covered for i, kind in enumerate(kinds)}
    )


def checks_figure(checks, broken):
    """Where each check fell in its interval, drawn from 0 to 1; controls below the line."""
    every = [*checks, *broken]
    figure, axis = plt.subplots(figsize=(7, 1 + 0.19 * len(every)), layout="constrained")
    for y, check in enumerate(every):
        width = max(check.high - check.low, 1e-9)
        place = np.clip((check.seen - check.low) / width, -0.45, 1.45)
        marker, colour = ("o", "#0072B2") if check.ok else ("X", "#D55E00")
        axis.plot(place, y, marker, color=colour)
    axis.axvspan(0, 1, color="#0072B2", alpha=0.1, label="had to fall here")
    axis.axhline(len(checks) - 0.5, color="black", linewidth=0.8)
    names = [c.claim for c in checks] + [f"control: {c.claim}" for c in broken]
    axis.set_yticks(range(len(every)), names, fontsize=7)
    axis.set(xlabel="position in its interval (clipped)", xlim=(-0.5, 1.5))
    axis.invert_yaxis()
    axis.legend(loc="upper right")
    return figure


# --- 43


def choosing_figure(risk, used, task, epsilon, title):
    """Left: realised risk by way of choosing, with 99 % intervals; right: layers by task.

    risk   mean and sem of `risk`, index (n, way); used   mean layers, index (task, method)
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for shift, (m, part) in enumerate(risk.groupby(level="n", sort=False)):
        place = np.arange(len(part)) + 0.18 * shift
        look = dict(fmt="os^D"[shift % 4], label=f"n = {m}")
        left.errorbar(part["risk", "mean"], place, xerr=WIDE * part["risk", "sem"], **look)
    left.axvline(epsilon, color="black", linewidth=0.8)
    left.set_yticks(range(len(part)), part.index.get_level_values("way"))
    left.set(xlabel="realised risk (99 % interval); line: ε", title=style.written(task))
    left.set_xlim(0)
    left.invert_yaxis()
    left.legend(loc="lower right")
    bars = used["layers"].reset_index()
    bars["task"] = bars["task"].map(style.written)
    sns.barplot(
        bars, x="task", y="layers", hue="method", palette=style.palette(bars["method"]), ax=right
    )
    right.set(xlabel="", ylabel="layers used", title=title)
    right.legend(title=None)
    return figure


def choosing_reading(risk, missed, used, task, epsilon, layers, delta):
    """Notebook 43's result in words, from its numbers."""
    n = risk.index.get_level_values("n")[0]
    looked, apart = (risk.loc[n, way] for way in (choosing.LOOKED, choosing.APART))
    low, high = (looked["risk", "mean"] + s * WIDE * looked["risk", "sem"] for s in (-1, 1))
    most = risk.index.get_level_values("n")[-1]
    safe, there = (risk.loc[most, way] for way in (choosing.BAND, choosing.LOOKED))
    rate, some = (missed[what].unstack("method").max() for what in ("missed", "somewhere"))
    price = used["layers"].unstack("method").eval("band / first_exit - 1")
    return (
        f"With n = {n} on {style.written(task)}, the {layers} layers that looked best gave"
        f" a risk of **{looked['risk', 'mean']:.3f}** (99 % interval {low:.3f} to {high:.3f}) where"
        f" {epsilon} was promised; chosen on other inputs {apart['risk', 'mean']:.3f}. With n ="
        f" {most}: {there['risk', 'mean']:.3f}, and with `band` {safe['risk', 'mean']:.3f}"
        f" ({safe['layers', 'mean']:.1f} layers instead of {there['layers', 'mean']:.1f}: to choose"
        " among so many sets costs much). With ε chosen by its savings the risk exceeded it in up"
        f" to {rate['ltt']:.1%} (`ltt`), {rate['pac']:.1%} (`pac`) and {rate['band']:.1%} (`band`)"
        f" of the calibrations; at *some* ε it did in up to {some['ltt']:.1%}, {some['pac']:.1%}"
        f" and {some['band']:.1%}, where {delta:.0%} is the promise (the risk is that of a finite"
        " rest of the table, which adds a little). To be free to choose ε costs"
        f" {price.min():.0%} to {price.max():.0%} more layers than `first_exit`. The rule: fix ε,"
        " measure and layers first; or choose on inputs that do not calibrate; or use `band`."
    )


# --- 44


def losses_figure(means, n_layers, model="F"):
    """Losses promised and seen, for numbers (left) and probabilities (middle), and the layers used.

    means   task, alpha, loss, layers; n_layers   {task: l}
    """
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.1), layout="constrained")
    looks = style.looks(means["task"], style.TASKS)
    for task, part in means.groupby("task", sort=False):
        seen = looks[task]
        look = dict(marker=seen.marker, color=seen.colour, label=seen.name)
        axes[0 if "error" in part and part["error"].notna().all() else 1].plot(
            part["alpha"], part["loss"], **look
        )
        axes[2].plot(part["alpha"], part["layers"] / n_layers[task], **look)
    for axis, what in zip(axes, ("mean |G − F|", "mean total variation")):
        axis.axline((0, 0), slope=1, color="black", linewidth=0.8)
        axis.set(xlabel="promised α", ylabel=f"{what}, seen", ylim=(0, None), xlim=(0, None))
        axis.legend(loc="upper left")
    axes[2].set(xlabel="promised α", ylabel=f"share of {model}'s layers", ylim=(0, 1.02))
    axes[2].legend(loc="upper right")
    return figure


def groups_table(groups):
    """The consistency of the worst class and the layers used, a row a task, from `group_trials`."""
    mean = groups.groupby(["task", "way", "group"], sort=False)["consistency"].mean()
    worst = mean.groupby(["task", "way"], sort=False).min().unstack("way")
    total = groups.assign(weight=groups["layers"] * groups["n"]).groupby(["task", "way"])
    used = (total["weight"].sum() / total["n"].sum()).unstack("way").loc[worst.index]
    return worst.add_prefix("worst class, ").join(used[worst.columns].add_prefix("layers, "))


def risk_reading(means, report, n_layers, epsilon):
    """Notebook 44's result in words, from its numbers."""
    lines = [
        f"* mean |G − F| at most {row.alpha}: seen **{row.loss:.3f}** with {row.layers:.1f} of"
        f" {n_layers} layers; mean |G − Y| {row.error:.3f}, F's own {row.error_of_F:.3f}"
        for row in means[means["error"].notna()].itertuples()
    ]
    over = int((means["loss"] > means["alpha"]).sum())
    one, largest = (report[f"worst class, {w}"] for w in ("one threshold", "the largest for all"))
    more = report["layers, the largest for all"] - report["layers, one threshold"]
    return (
        "On STS-B:\n\n" + "\n".join(lines) + f"\n\nOf {len(means)} promises of a mean loss {over}"
        " are exceeded by the mean over splits. In classes: one threshold for all leaves the worst"
        f" class at {one.min():.1%} to {one.max():.1%} where {1 - epsilon:.0%} is wanted; the"
        f" largest of the classes' thresholds at {largest.min():.1%} to {largest.max():.1%}, for"
        f" {more.min():.1f} to {more.max():.1f} layers more."
    )
