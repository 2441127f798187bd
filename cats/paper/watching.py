"""Streams of real inputs under a monitor, for notebook 45: how often it cries wolf, how soon it
finds a shift, what auditing costs.

The rows of a ScoreTable are the population: calibration inputs and streams are drawn from them with
replacement, so that the true risk of every threshold is known, and each trial is independent of the
others. Given the threshold, audited inputs disagree with F with known probabilities; nothing else
about them matters to a monitor.
"""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats
from scipy.special import softmax

from cats.paper import style
from cats.stats.calibrators import CalibrationSet
from cats.stats.exits import agreement, first_above, worst_score
from cats.stats.monitor import Monitor
from cats.stats.quantiles import Bools, conformal_quantile, most_errors
from cats.stats.table import ScoreTable

LOOK = 100  # audited inputs after which the naive way looks at its p-value
CLASSES = {"vitaminc": ("refuted claims", [1]), "ag_news": ("business and technology", [2, 3])}


# --- populations


def parts(task: str, table: ScoreTable) -> dict[str, np.ndarray]:
    """Kinds of inputs that a stream may shift to, as masks (n,): by label where the task has
    classes that are harder than others, and by F's confidence. Lengths and pages are not in the
    tables.
    """
    confidence = softmax(table.logits[:, -1].astype(float), axis=-1).max(axis=-1)
    name, labels = CLASSES.get(task, ("negative reviews", [0]))
    return {
        name: np.isin(np.asarray(table.labels), labels),
        "harder half": confidence <= np.quantile(confidence, 0.5),
        "hardest quarter": confidence <= np.quantile(confidence, 0.25),
    }


class Population:
    """A table, and how often G ≠ F in it for any threshold."""

    def __init__(self, table: ScoreTable, measure: str = "meta") -> None:
        self.scores, self.consistent = table.scores(measure), table.consistent
        self.n, self.depth = len(table), table.n_layers
        self.worst = worst_score(self.scores, self.consistent, only_records=True)

    def boundary(self, epsilon: float) -> float:
        """The threshold with the largest risk that is at most ε: the promise just kept."""
        cal = CalibrationSet(self.scores, self.consistent)
        risks = cal.errors(cal.events.score) / self.n
        kept = np.flatnonzero(risks <= epsilon)
        return float(cal.events.score[kept[risks[kept].argmax()]])

    def draw(
        self,
        rng: np.random.Generator,
        epsilon: float,
        n: int,
        delta: float | None,
        part: Any = None,
    ) -> float:
        """The threshold of a calibration on n inputs drawn from the population, or from a part of
        it: `pac` with this δ, or without one `first_exit`.
        """
        rows = np.arange(self.n) if part is None else np.flatnonzero(part)
        worst = np.sort(self.worst[rng.choice(rows, n)])
        if delta is None:
            return conformal_quantile(worst, 1 - epsilon)
        most = most_errors(n, epsilon, delta)
        return np.inf if most < 0 else float(worst[n - most - 1])

    def at(self, threshold: float) -> tuple[np.ndarray, np.ndarray]:
        """Whether G ≠ F, and the exit layer, of every row."""
        exits = first_above(self.scores, np.full(self.depth - 1, threshold))
        return ~agreement(self.consistent, exits), exits


# --- streams


def alarms(errors: np.ndarray, monitor: Monitor) -> dict[str, np.ndarray]:
    """At which audited input, counted from 1, the monitor and the naive way first raise an alarm in
    each stream (trials, audited inputs); 0 for never.

    The naive way is an exact binomial test of risk ≤ ε at level δ, after every LOOK inputs.
    """
    audited = np.arange(1, errors.shape[1] + 1)
    counts = errors.cumsum(axis=1)
    looks = np.arange(LOOK, errors.shape[1] + 1, LOOK)
    limit = stats.binom.isf(monitor.delta, looks, monitor.epsilon)
    naive = np.zeros(errors.shape, bool)
    naive[:, looks - 1] = counts[:, looks - 1] > limit
    chunks = np.array_split(np.arange(len(errors)), max(1, len(errors) // 20))
    wealth = [monitor._wealth(counts[rows], audited[None]) for rows in chunks]
    found = {"monitor": np.concatenate(wealth) >= 1 / monitor.delta, "p-values": naive}
    return {
        name: np.where(over.any(axis=1), over.argmax(axis=1) + 1, 0) for name, over in found.items()
    }


def quiet(
    population: Population,
    epsilon: float,
    delta: float,
    n: int,
    few: int,
    audits: int,
    trials: int,
    seed: int,
) -> pd.DataFrame:
    """No shift: the share of streams in which an alarm is ever raised, a row a way to choose the
    threshold and to watch it.

    just kept     the threshold whose risk is the largest that is at most ε
    pac           calibrated on n inputs with δ/2, watched with δ/2: together δ
    first_exit    calibrated on a few inputs: its risk is at most ε on average alone
    """
    rng, rows = np.random.default_rng(seed), []
    known = population.at(population.boundary(epsilon))[0].mean()
    for kind in ("just kept", "pac", "first_exit"):
        share = delta / 2 if kind == "pac" else delta
        risks = np.full(trials, known)
        if kind != "just kept":
            given = (n, share) if kind == "pac" else (few, None)
            taus = [population.draw(rng, epsilon, *given) for _ in range(trials)]
            risks = np.array([population.at(tau)[0].mean() for tau in taus])
        errors = rng.random((trials, audits)) < risks[:, None]
        for way, first in alarms(errors, Monitor(epsilon, share)).items():
            if way == "monitor" or kind == "just kept":
                counts = {"threshold": kind, "way": way, "alarms": int((first > 0).sum())}
                rows.append(counts | {"risk": risks.mean(), "above": (risks > epsilon).mean()})
    return pd.DataFrame(rows).assign(streams=trials)


def verdicts(quiet: pd.DataFrame, delta: float, alarm: float) -> pd.DataFrame:
    """Whether so many alarms are what δ allows: their count against Binomial(streams, δ)'s upper
    quantile, which a keeper of δ exceeds with probability at most `alarm`.
    """
    limit = stats.binom.isf(alarm, quiet["streams"], delta).astype(int)
    return quiet.assign(limit=limit, within=quiet["alarms"] <= limit)


def delays(
    population: Population,
    part: Bools,
    epsilon: float,
    delta: float,
    n: int,
    shares: Sequence[float],
    inputs: int,
    begin: int,
    slow: int,
    trials: int,
    seed: int,
) -> pd.DataFrame:
    """Inputs from the beginning of a shift to the alarm: a row a kind of shift, an audit share and
    a trial; NaN where there was none, in `inputs` inputs.

    At input `begin` all inputs become those of `part` (sudden), or more and more of them, all after
    `slow` inputs (slow). The threshold is `pac`'s with δ/2, watched with δ/2.
    """
    rng, frames = np.random.default_rng(seed), []
    taus = [population.draw(rng, epsilon, n, delta / 2) for _ in range(trials)]
    before, after = np.empty((2, trials, 1))
    for i, tau in enumerate(taus):
        wrong, _ = population.at(tau)
        before[i], after[i] = wrong.mean(), wrong[part].mean()
    for share in shares:
        gaps = rng.geometric(share, (trials, int(inputs * share * 1.2) + 50))
        place = gaps.cumsum(axis=1)  # of audited inputs in the stream
        for kind, long in (("sudden", 1), ("slow", slow)):
            new = np.clip((place - begin) / long, 0, 1)  # share of the new kind by then
            errors = rng.random(place.shape) < before + new * (after - before)
            first = alarms(errors, Monitor(epsilon, delta / 2))["monitor"]
            when = np.where(first > 0, place[np.arange(trials), first - 1] - begin, np.nan)
            when[when > inputs - begin] = np.nan
            found = {"shift": kind, "audit": share, "inputs": when, "risk": after.ravel()}
            frames.append(pd.DataFrame(found).assign(trial=np.arange(trials)))
    return pd.concat(frames, ignore_index=True)


def recalibrated(
    population: Population,
    part: Bools,
    epsilon: float,
    delta: float,
    n: int,
    trials: int,
    seed: int,
) -> dict[str, float]:
    """Consistency and layers before a shift, after it, and after a recalibration on n audited
    inputs of the new kind (`pac`); and what an audit costs in layers. Means over trials.
    """
    rng, rows = np.random.default_rng(seed), []
    for _ in range(trials):
        old = population.draw(rng, epsilon, n, delta / 2)
        new = population.draw(rng, epsilon, n, delta / 2, part)
        (wrong, exits), (again, later) = population.at(old), population.at(new)
        row = {"before": 1 - wrong.mean(), "shifted": 1 - wrong[part].mean()}
        row |= {"recalibrated": 1 - again[part].mean(), "layers": exits.mean()}
        row |= {"layers, shifted": exits[part].mean(), "layers, recalibrated": later[part].mean()}
        rows.append(row | {"audit": (population.depth - exits).mean()})
    return pd.DataFrame(rows).mean().to_dict()


# --- pictures


def delays_table(found: pd.DataFrame) -> pd.DataFrame:
    """Median, quartiles and share of alarms, a row a task, part, shift and audit share."""
    keys = ["task", "part", "shift", "audit"]
    grouped = found.groupby(keys, sort=False)["inputs"]
    at = [0.25, 0.5, 0.75]
    late = grouped.apply(  # some are infinite
        lambda part: np.quantile(part.fillna(np.inf), at, method="inverted_cdf")
    )
    columns = pd.DataFrame(late.tolist(), late.index, ["low", "median", "high"])
    return columns.assign(alarmed=grouped.count() / grouped.size()).reset_index()


def watching_figure(delay: pd.DataFrame, rates: pd.DataFrame, delta: float, inputs: int) -> Figure:
    """Left: false alarms, by way; then inputs until the alarm against the audit share, sudden and
    slow.
    """
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
    both = rates.assign(rate=rates["alarms"] / rates["streams"])
    both["name"] = both["threshold"] + ",\n" + both["way"]
    names = list(dict.fromkeys(both["name"]))
    drawn = style.looks(both["task"], style.TASKS)
    for task, part in both.groupby("task", sort=False):
        look = dict(color=drawn[task].colour, marker=drawn[task].marker, label=drawn[task].name)
        axes[0].plot(100 * part["rate"], [names.index(x) for x in part["name"]], ls="", **look)
    axes[0].axvline(100 * delta, color="black", linewidth=0.8)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set(xlabel="streams with a false alarm (%)", title="no shift; line: δ", xlim=(-1, None))
    axes[0].invert_yaxis()
    axes[0].legend(loc="upper right")
    harder = ("-", "left")  # a class: strokes and marks, which tell a lone point
    strokes = {"harder half": ("--", "none"), "hardest quarter": (":", "full")}
    for axis, kind in zip(axes[1:], ("sudden", "slow")):
        for (task, part), rows in delay[delay["shift"] == kind].groupby(["task", "part"]):
            shown = rows[np.isfinite(rows["median"])]
            dash, filled = strokes.get(part, harder)
            look = dict(color=drawn[task].colour, marker=drawn[task].marker, markersize=5)
            axis.plot(shown["audit"], shown["median"], ls=dash, fillstyle=filled, **look)
        axis.axhline(inputs, color="black", linewidth=0.8)
        axis.set(xscale="log", ylim=(0, 1.05 * inputs), xlabel="share of inputs audited")
        axis.set_xticks(
            sorted(set(delay["audit"])), [f"{x:g}" for x in sorted(set(delay["audit"]))]
        )
        axis.set_title(f"{kind} shift")
    axes[1].set_ylabel("inputs until the alarm (median)")
    for name, (dash, filled) in {"a harder class": harder, **strokes}.items():
        axes[2].plot([], [], color="black", marker="o", ls=dash, fillstyle=filled, label=name)
    axes[2].legend(loc="lower left", title="shift to (line above: the end)", title_fontsize=8)
    return figure
