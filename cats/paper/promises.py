"""Pictures of the notebooks on promises: 11 (theorems), 43 (choosing), 44 (losses and
groups).
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from scipy.stats import kstwo, norm

from cats.paper import style
from cats.stats import trials, validity
from cats.stats.calibrators import METHODS
from cats.stats.quantiles import Floats

WIDE = norm.isf(0.005)  # 99 % intervals over trials
CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe and Ito's


# --- 11


def coverage_figure(covered: Mapping[str, tuple[Floats, Floats]], n: int, epsilon: float) -> Figure:
    """The true coverage of many calibrations against its Beta law, and each through its own law.

    covered   {method: (coverages, the same made uniform)} as `validity.coverages` gives them
    """
    figure, axes = plt.subplots(
        1, 3, figsize=(10, 3), layout="constrained", width_ratios=[1, 1, 1.1]
    )
    grid, law = np.linspace(0.75, 1, 400), validity.coverage_law(n, epsilon)
    name = "Beta({}, {})".format(*law.args)
    for axis, method in zip(axes, list(covered)[1:]):
        colour = style.METHODS[method].colour
        drawn = dict(color=colour, alpha=0.5, label="seen")
        axis.hist(covered[method][0], bins=60, range=(0.75, 1), density=True, **drawn)
        axis.plot(grid, law.pdf(grid), color="black", label=name)
        axis.axvline(1 - epsilon, color="black", linestyle=":", label="1 − ε")
        axis.set(title=f"{method}, n={n}, ε={epsilon}", xlabel="true coverage  P(V ≤ τ)")
        axis.set_ylabel("density")
        axis.legend(loc="upper left")
    size = min(len(uniform) for _, uniform in covered.values())
    band = kstwo.isf(0.01, size)
    axes[2].axhspan(-band, band, color="#888888", alpha=0.18, linewidth=0)
    axes[2].axhline(0, color="black", linewidth=0.8)
    for method, (_, uniform) in covered.items():
        steps, look = (np.arange(len(uniform)) + 0.5) / len(uniform), style.METHODS[method]
        line = dict(color=look.colour, marker=look.marker, markevery=len(steps) // 8, markersize=4)
        axes[2].plot(steps, np.sort(uniform) - steps, label=method, linewidth=1.2, **line)
    axes[2].set(xlabel="expected", ylabel="seen − expected", ylim=(-2 * band, 2 * band))
    axes[2].set_title("through its own law (grey: 99 % band)")
    axes[2].legend(loc="upper center", ncols=3, fontsize="small", columnspacing=1)
    return figure


def coverage_data(covered: Mapping[str, tuple[Floats, Floats]]) -> pd.DataFrame:
    """The numbers behind `coverage_figure`, a column a method and kind."""
    kinds = ("coverage", "uniform")
    return pd.DataFrame(
        {f"{m} {kind}": covered[m][i] for m in covered for i, kind in enumerate(kinds)}
    )


def checks_figure(checks: Sequence[validity.Check], broken: Sequence[validity.Check]) -> Figure:
    """Where each check fell in its interval, drawn from 0 to 1; controls below the line."""
    every = [*checks, *broken]
    figure, axis = plt.subplots(figsize=(7.4, 1 + 0.2 * len(every)), layout="constrained")
    for y, check in enumerate(every):
        width = max(check.high - check.low, 1e-9)
        place = np.clip((check.seen - check.low) / width, -0.45, 1.45)
        marker, colour = ("o", "#0072B2") if check.ok else ("X", "#D55E00")
        axis.plot(place, y, marker, color=colour)
    axis.axvspan(0, 1, color="#0072B2", alpha=0.1, label="had to fall here")
    axis.axhline(len(checks) - 0.5, color="black", linewidth=0.8)
    names = [c.claim for c in checks] + [f"control: {c.claim}" for c in broken]
    axis.set_yticks(range(len(every)), names, fontsize=8)
    axis.set(xlabel="position in its interval (clipped)", xlim=(-0.5, 1.5))
    axis.invert_yaxis()
    axis.legend(loc="upper right")
    return figure


# --- 43


def choosing_figure(
    risk: pd.DataFrame, used: pd.DataFrame, task: str, epsilon: float, title: str
) -> Figure:
    """Left: realised risk by way of choosing, with 99 % intervals; right: layers by task.

    risk   mean and sem of `risk`, index (n, way); used   mean layers, index (task, method)
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for shift, (m, part) in enumerate(risk.groupby(level="n", sort=False)):
        place = np.arange(len(part)) + 0.18 * shift
        look = dict(fmt="os^D"[shift % 4], color=CYCLE[shift % 4], label=f"n = {m}")
        left.errorbar(part["risk", "mean"], place, xerr=WIDE * part["risk", "sem"], **look)
    left.axvline(epsilon, color="black", linewidth=0.8)
    left.set_yticks(range(len(part)), part.index.get_level_values("way"))
    left.set(xlabel="realised risk (99 % interval); line: ε", title=style.written(task))
    left.set_xlim(-0.003)  # a risk of 0 is seen whole
    left.invert_yaxis()
    left.legend(loc="lower right")
    bars = used["layers"].reset_index()
    bars["task"] = bars["task"].map(style.written)
    look = dict(hue="method", palette=style.palette(bars["method"]), saturation=1)
    sns.barplot(bars, x="task", y="layers", ax=right, **look)
    right.set(xlabel="", ylabel="layers used", title=title)
    sns.move_legend(right, "upper left", bbox_to_anchor=(1, 1), title=None)
    return figure


# --- 44


def losses_figure(means: pd.DataFrame, n_layers: Mapping[str, int], model: str = "F") -> Figure:
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


def groups_table(groups: pd.DataFrame) -> pd.DataFrame:
    """The consistency of the worst class and the layers used, a row a task, from `group_trials`."""
    mean = groups.groupby(["task", "way", "group"], sort=False)["consistency"].mean()
    worst = mean.groupby(["task", "way"], sort=False).min().unstack("way")
    total = groups.assign(weight=groups["layers"] * groups["n"]).groupby(["task", "way"])
    used = (total["weight"].sum() / total["n"].sum()).unstack("way").loc[worst.index]
    return worst.add_prefix("worst class, ").join(used[worst.columns].add_prefix("layers, "))


# --- 10


def flat(summary: pd.DataFrame) -> pd.DataFrame:
    """`cats.summary` with one level of columns, for a CSV."""
    return summary.set_axis([f"{a}_{b}" for a, b in summary.columns], axis=1).reset_index()


def promised_and_achieved(frame: pd.DataFrame, epsilon: float) -> pd.DataFrame:
    """What each method promises, and the mean consistency, bound and layers at one ε."""
    means = trials.summary(frame).xs("mean", axis=1, level=1).reset_index()
    promise = {
        "none": "nothing",
        "bound": "its bound",
        "marginal": "P(G=F) ≥ 1-ε",
        "pac": "P(risk ≤ ε) ≥ 0.99",
    }
    means["promise"] = [
        promise[METHODS[m].guarantee] if m in METHODS else "sees the answers"
        for m in means["method"]
    ]
    columns = ["method", "promise", "consistency", "bound", "layers"]
    return means[np.isclose(means["epsilon"], epsilon)][columns].round(3).reset_index(drop=True)
