"""What each notebook found, as a small dict: the fields of its reading and of the README.

    facts("22_consistency")                      # from the numbers it left in the figures' folder
    facts("03_early_heads", "sentiment-demo-0")  # of a stage, for one run

A fact is a number, a word or a truth. It is computed from the files that the notebook saved and
from the paper's printed numbers, so a reading follows its numbers wherever they go. Where there is
nothing to say (a task that is not there, a claim the paper does not make) the fact is None.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.stats import fisher_exact

from cats._io import read_json
from cats.paper.places import DATA, FIGURES
from cats.paper.report import PAPER_LAYERS, PAPER_MODEL
from cats.paper.seeds import compared
from cats.paper.style import title, written
from cats.stats.calibrators import METHODS
from cats.stats.quantiles import Bools, Ints
from cats.stats.table import ScoreTable
from cats.stats.validity import covered_law

Facts = dict[str, Any]
Finder = Callable[..., Facts]
ALL: dict[str, Finder] = {}
ALARM = 1e-3  # probability of "no" where a promise is just kept, in one check
SPLITS = 5  # a random split tests on a fifth of a table, so a table is worth five of them


class Files:
    """The results of one notebook, of a stage those of one run."""

    def __init__(self, folder: Path, run: str = "") -> None:
        self.folder, self.run = Path(folder), run

    def path(self, name: str, kind: str = "csv") -> Path:
        return self.folder / f"{name}{'-' + self.run if self.run else ''}.{kind}"

    def has(self, name: str) -> bool:
        return self.path(name).exists()

    def __call__(self, name: str) -> pd.DataFrame:
        """The numbers of one result."""
        return pd.read_csv(self.path(name))

    def made(self, name: str) -> dict:
        """How a result was made: its parameters, and where and when if it was timed."""
        about = read_json(self.path(name, "json")) or {}
        return about.get("parameters", {}) | about.get("measured", {})


def about(notebook: str) -> Callable[[Finder], Finder]:
    """Enter a function as the one that finds a notebook's facts."""

    def enter(function: Finder) -> Finder:
        ALL[notebook] = function
        return function

    return enter


def facts(notebook: str, run: str = "", folder: Path = FIGURES, **more: Any) -> Facts:
    """The facts of a notebook, with those that are in no file (`more`)."""
    found = ALL[notebook](Files(folder, run), **more)
    plain = {
        name: value.item() if hasattr(value, "item") else value for name, value in found.items()
    }
    # what too few inputs leave without a number is nothing to say
    return {name: None if value != value else value for name, value in plain.items()}


def paper(name: str) -> pd.DataFrame:
    """A table of data/paper, as printed."""
    return pd.read_csv(DATA / "paper" / f"{name}.csv")


def of(flags: ArrayLike) -> str:
    """How many of how many.

    >>> of([True, False, True])
    '2 of 3'
    """
    flags = np.asarray(flags, bool)
    return f"{int(flags.sum())} of {flags.size}"


def mostly(flags: Any) -> str:
    """Whether something holds always, more often than not, or not.

    >>> mostly([True, True]), mostly([True, False, True]), mostly([True, False])
    ('yes', 'mostly', 'no')
    """
    share = np.mean(np.asarray(flags, bool))
    return "yes" if share == 1 else "mostly" if share > 0.5 else "no"


def side(value: float) -> str:
    """On which side of zero.

    >>> side(0.1), side(-0.1)
    ('above', 'below')
    """
    return "above" if value >= 0 else "below"


def spread(values: Iterable[Any], form: str = "{:.1f}") -> str:
    """The smallest and the largest of some values.

    >>> spread([3, 1, 2])
    '1.0 to 3.0'
    """
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def reach(gap: ArrayLike, deviation: ArrayLike) -> Facts:
    """Whether means over random splits reach their targets, as far as one table can tell.

    gap        mean minus target
    deviation  between splits; the mean of all splits of a table is as noisy as that of five, so a
               shortfall of three such errors is what a kept promise may show
    """
    gap, error = np.asarray(gap, float).round(9), np.asarray(deviation, float) / SPLITS**0.5
    return {
        "reached": of(gap >= 0),
        "reach": bool((gap >= -3 * error - 1e-9).all()),
        "margin": 100 * abs(gap.min()),
        "margin_side": side(gap.min()),
    }


def _promises(method: str) -> bool:
    """Whether a method, or a row method/measure, promises ε."""
    known = METHODS.get(method.partition("/")[0])
    return known is not None and known.guarantee in ("marginal", "pac")


def _splits(frame: pd.DataFrame) -> Facts:
    """`reach` for a frame of means and percentiles over splits, methods with a promise."""
    part = frame[frame["method"].map(_promises)]
    half = (part["consistency_high"] - part["consistency_low"]) / 2  # 68 % lie between the two
    return reach(part["consistency_mean"] - 1 + part["epsilon"], half)


def _near(values: Iterable[float], wanted: float = 0.05) -> float:
    return min(values, key=lambda value: abs(value - wanted))


def _example(tasks: Iterable[str], wanted: str = "ag_news") -> str:
    """The task that stands for all in a sentence."""
    tasks = list(dict.fromkeys(tasks))
    return wanted if wanted in tasks else tasks[0]


# --- 00 to 05: from text to tables


@about("00_start")
def start(read: Files, test: ScoreTable, exits: Ints, agrees: Bools, epsilon: float) -> Facts:
    """`test` is the ScoreTable, `exits` and `agrees` what its inputs did."""
    n, target, share = len(exits), 1 - epsilon, float(np.mean(agrees))
    both = read("00_start_figure_2").groupby("example")["confidence"].mean()
    error = (2 * epsilon * target / n) ** 0.5  # of a test, and of a calibration as large
    made, contents = read.made("00_start"), read("00_start")
    return dict(
        task=written(made["task"]),
        backbone=written(made["backbone"]),
        epsilon=epsilon,
        target=target,
        n=n,
        agreement=share,
        kept=share >= target - 3 * error,
        gap=100 * abs(share - target),
        gap_side=side(share - target),
        layers=np.mean(exits),
        depth=test.n_layers,
        fewer=np.mean(exits) < test.n_layers,
        quarter=np.mean(exits <= test.n_layers / 4),
        late=np.mean(exits > 3 * test.n_layers / 4),
        easy=both["easy"],
        hard=both["hard"],
        follows=both["hard"] < both["easy"],
        regenerates=of(contents["regenerates"].fillna("") != ""),
    )


@about("01_tasks")
def tasks(read: Files) -> Facts:
    sizes, theirs = read("01_tasks"), paper("table2_datasets")
    kinds = sorted(sizes["labels"].astype(str))
    return dict(
        tasks=len(sizes),
        kinds=", ".join(kinds),
        same=kinds == ["2", "3", "4", "regression"],
        train=spread(sizes["train"], "{:,}"),
        paper_train=spread(theirs["train"], "{:,}"),
        smaller=sizes["train"].max() < theirs["train"].max(),
        held_out=spread(sizes["validation"], "{:,}"),
        tune=spread((0.7 * sizes["train"]).astype(int), "{:,}"),
        meta=spread((0.2 * sizes["train"]).round().astype(int), "{:,}"),
    )


@about("02_fine_tuning")
def fine_tuning(read: Files, performance: float, metric: str) -> Facts:
    log = read("02_fine_tuning")
    loss = log["loss"].dropna()
    theirs = paper("table2_datasets").set_index("task")["full_model_test_performance"]
    task = read.run.partition("-")[0]
    same = theirs[theirs.index == task]
    return dict(
        run=title(read.run),
        first=loss.iloc[0],
        last=loss.iloc[-1],
        falls=loss.iloc[-1] < loss.iloc[0],
        epochs=log["epoch"].max(),
        metric=metric,
        performance=performance,
        paper_performance=spread((same if len(same) else theirs) / 100, "{:.2f}"),
        reached=performance >= same[task] / 100 if len(same) else "other tasks",
    )


@about("03_early_heads")
def early_heads(read: Files) -> Facts:
    frame = read("03_early_heads")
    first, last = frame["consistency"].iloc[0], frame["consistency"].iloc[-1]
    others = [name for name in frame if name.startswith("consistency, ")]
    other = frame[others[0]].iloc[0] if others else None
    before, after = (
        frame[name].mean() if "ece_before" in frame else None for name in ("ece_before", "ece")
    )
    return dict(
        run=title(read.run),
        first=first,
        last=last,
        early=int(frame["layer"].max()),
        rises=last > first,
        recipe=others[0].split(", ")[1] if others else None,
        other=other,
        gains=None if other is None else other > first,
        before=before,
        after=after,
        lower=None if before is None else after < before,
    )


@about("04_meta_classifiers")
def meta_classifiers(read: Files, depth: int) -> Facts:
    frame, worth = read("04_meta_classifiers"), read("04_meta_classifiers_features")
    worth = worth.set_index("features")
    without = worth["layers"].filter(like="without") - worth["layers"]["all"]
    softmax = frame["auroc_sm"].mean() if "auroc_sm" in frame else None
    return dict(
        run=title(read.run),
        depth=depth,
        meta=frame["auroc_meta"].mean(),
        softmax=softmax,
        better=None if softmax is None else frame["auroc_meta"].mean() > softmax,
        layers=worth["layers"]["all"],
        dearest=without.idxmax().split()[-1] if len(without) else None,
        dear=without.max() if len(without) else None,
        cheapest=without.idxmin().split()[-1] if len(without) else None,
        cheap=without.min() if len(without) else None,
        each=of(without > 0) if len(without) else None,
        all_help=bool((without > 0).all()) if len(without) else None,
    )


@about("05_scores")
def scores(read: Files, outcome: pd.DataFrame, epsilon: float) -> Facts:
    """`outcome` is the frame of agreement and layers by method and measure."""
    at, counts = outcome.set_index(["method", "measure"]), read("05_scores_exits")
    counts = counts.set_index("difficulty")
    counts.columns = counts.columns.astype(int)
    n = int(counts.to_numpy().sum())
    one, gap = at.loc["first_exit", "meta"], at["consistency"] - 1 + epsilon
    error = (2 * epsilon * (1 - epsilon) / n) ** 0.5  # of a calibration and of a test as large
    middle = (counts * counts.columns).sum(axis=1) / counts.sum(axis=1)
    return dict(
        run=title(read.run),
        epsilon=epsilon,
        target=1 - epsilon,
        agreement=one["consistency"],
        kept=bool((gap >= -3 * error).all()),
        gap=100 * abs(one["consistency"] - 1 + epsilon),
        gap_side=side(one["consistency"] - 1 + epsilon),
        layers=one["layers"],
        shared=at.loc[("shared", "meta"), "layers"],
        earlier=one["layers"] <= at.loc[("shared", "meta"), "layers"],
        depth=int(counts.columns.max()),
        easy=middle.iloc[0] if len(middle) > 1 else None,
        hard=middle.iloc[-1] if len(middle) > 1 else None,
        grows=bool(middle.is_monotonic_increasing) if len(middle) > 1 else None,
    )


# --- 10 and 11: calibration and theorems


@about("10_calibration")
def calibration(read: Files, epsilon: float, depth: int) -> Facts:
    frame = read("10_calibration")
    at = frame[np.isclose(frame["epsilon"], epsilon)].set_index("method")
    used = at["layers_mean"]
    return _splits(frame) | dict(
        epsilon=epsilon,
        target=1 - epsilon,
        depth=depth,
        shared=used["shared"],
        first_exit=used["first_exit"],
        ltt=used["ltt"],
        oracle=used["oracle"],
        order=bool(used["first_exit"] <= used["shared_all"] <= used["shared"]),
        naive=of(frame.query("method == 'naive'").eval("consistency_mean < 1 - epsilon - 1e-9")),
    )


@about("11_theorems")
def theorems(read: Files) -> Facts:
    claims, controls = read("11_theorems_claims"), read("11_theorems_controls")
    held, caught = claims["verdict"] == "holds", controls["verdict"] != "holds"
    named = claims["claim"].str.extract(r"^(Lemma|Proposition|Theorem|Remark)")[0].notna()
    return dict(
        held=of(held[named]),
        holds=bool(held[named].all()),
        added=of(held[~named]),
        added_hold=bool(held[~named].all()),
        caught=of(caught),
        all_caught=bool(caught.all()),
        trials=read.made("11_theorems_claims")["trials"],
        alarm=claims["false_alarm"].sum(),
    )


# --- 21 to 24: the paper's body


@about("21_tasks_and_features")
def features(read: Files) -> Facts:
    table, keys = read("21_tasks_and_features_table_2"), ["task", "backbone", "measure"]
    gap = (table["F"] - table["paper F"]).dropna()
    cases = read("21_tasks_and_features").set_index(keys)
    used = [name for name in cases if name != "mean AUROC"]
    single = cases.drop("meta", level="measure")
    meta = cases.xs("meta", level="measure").loc[[case[:2] for case in single.index]]
    meta = meta.set_axis(single.index)
    better = meta["mean AUROC"] > single["mean AUROC"]
    alike = [name for name in used if name.startswith("shared ")]  # Table C.2 has `shared` only
    wins = (meta[alike] < single[alike]).query("measure == 'pmax'").to_numpy()
    theirs = paper("tableC2_measures_dev").pivot_table(
        index=["task", "target"], columns="measure", values="layers"
    )
    theirs = theirs["meta"] < theirs["sm"]
    return dict(
        rows=len(table),
        below=of(gap < 0) if len(gap) else None,
        gap=spread(gap, "{:+.1f}") if len(gap) else None,
        as_strong=bool((gap >= 0).all()) if len(gap) else None,
        better=of(better),
        all_better=bool(better.all()),
        fewer=of(meta[used] < single[used]),
        wins=of(wins) if wins.size else None,
        wins_most=mostly(wins) if wins.size else None,
        theirs=of(theirs),
    )


@about("22_consistency")
def consistency(read: Files) -> Facts:
    frame = read("22_consistency")
    frame = frame[(frame["method"] != "static") | (frame["measure"] == "meta")]
    free = frame[~frame["method"].map(_promises)]
    missed = free["consistency_mean"] < (1 - free["epsilon"] - 1e-9)
    used = frame.pivot(
        index=["task", "measure", "epsilon"], columns="method", values="layers_mean"
    ).reindex(columns=["independent", "shared", "first_exit"])
    shared = used["shared"].unstack("measure").reindex(columns=["sm", "meta"]).dropna()
    wins, near = shared["meta"] < shared["sm"], _near(set(frame["epsilon"]))
    saved = (used["shared"] - used["first_exit"]).xs(near, level="epsilon")
    both = read("22_consistency_paper").query("method == 'shared' and measure == 'meta'")
    at: Facts = {}
    if len(both):
        both = both[both["task"] == _example(both["task"])]
        at = both.sort_values("target").iloc[-1].to_dict()
    backbone = read.made("22_consistency")["backbone"]
    same = backbone == PAPER_MODEL
    return _splits(frame) | dict(
        free=of(missed),
        cheaper=of(used["shared"] < used["independent"]),
        cheaper_most=mostly(used["shared"] < used["independent"]),
        wins=of(wins) if len(wins) else None,
        wins_most=mostly(wins) if len(wins) else None,
        epsilon=near,
        saved=spread(saved, "{:.1f}"),
        task=written(at["task"]) if at else None,
        target=at.get("target"),
        share=at.get("share"),
        share_paper=at.get("share_paper"),
        encoder="same encoder" if same else "other encoder",
        backbone=None if same else written(backbone),
    )


@about("23_tables")
def tables(read: Files) -> Facts:
    frame = read("23_tables")
    part = frame[frame["method"].map(_promises)]
    found = reach((part["consistency"] - 100 * part["target"]) / 100, part["consistency_std"] / 100)
    used, theirs = (
        frame.pivot(index=["task", "target"], columns="method", values=name)
        for name in ("layers", "layers_paper" if "layers_paper" in frame else "layers")
    )
    rows = ["independent/meta", "shared/sm", "shared/meta"]
    cheapest, printed = (
        part.reindex(columns=rows).dropna(how="all").idxmin(axis=1) == "shared/meta"
        for part in (used, theirs)
    )
    right = part.reindex(columns=["accuracy", "guaranteed"]).dropna(subset=["accuracy"])
    enough = right["accuracy"] >= right["guaranteed"]
    saved = 1 - used["first_exit/meta"] / used["shared/meta"]
    return found | dict(
        cheapest=of(cheapest),
        cheapest_paper=of(printed),
        cheapest_most=mostly(cheapest),
        right=of(enough) if len(enough) else None,
        all_right=bool(enough.all()) if len(enough) else None,
        saved=saved.mean(),
        saved_range=spread(saved, "{:.0%}"),
        saves=bool((saved >= 0).all()),
        ltt=of(used["ltt/meta"] < used["shared/meta"]),
        oracle=used["oracle"].mean(),
        first_exit=used["first_exit/meta"].mean(),
    )


@about("24_exit_layers")
def exit_layers(read: Files) -> Facts:
    table = read("24_exit_layers_means")
    used = table.pivot(index=["task", "epsilon"], columns="method", values="layers")
    wide = used["shared"].unstack("epsilon")
    low, high = wide.columns.min(), wide.columns.max()
    gap = table["consistency"] - 1 + table["epsilon"]
    error = (
        table["epsilon"] * (1 - table["epsilon"]) * (1 / table["validation"] + 1 / table["test"])
    ) ** 0.5  # of one calibration and one test
    last = table[table["method"] == "shared"].pivot(index="task", columns="epsilon", values="last")
    falls = wide.diff(axis=1).iloc[:, 1:] <= 0
    return dict(
        low=low,
        high=high,
        moves="; ".join(
            f"{written(task)} {wide[low][task]:.1f} → {wide[high][task]:.1f}" for task in wide.index
        ),
        falls=bool(falls.all(axis=None)),
        earlier=spread(used["shared"] - used["first_exit"], "{:.1f}"),
        never_later=bool((used["first_exit"] <= used["shared"]).all()),
        reached=of(gap.round(9) >= 0),
        kept=bool((gap >= -3 * error).all()),
        worst=100 * abs(gap.min()),
        worst_side=side(gap.min()),
        whole_low=spread(last[low], "{:.0%}"),
        whole_high=spread(last[high], "{:.0%}"),
        latest=written(wide[low].idxmax()),
    )


# --- 30 to 33: the paper's appendices


@about("30_naive")
def naive(read: Files) -> Facts:
    frame, theirs = read("30_naive"), paper("tableC1_naive_dev")
    ours, ltt = (
        frame[frame["method"].str.startswith(name)].reset_index(drop=True)
        for name in ("naive", "ltt")
    )
    gap, paper_gap = (100 * part["target"] - part["bound"] for part in (ours, theirs))
    low, paper_low = (part["consistency"] < 100 * part["target"] for part in (ours, theirs))
    extra = ltt["layers"] / ours["layers"] - 1
    ltt_gap = (ltt["consistency"] - 100 * ltt["target"]) / 100
    return reach(ltt_gap, ltt["consistency_std"] / 100) | dict(
        bounds=of(gap > 0),
        bounds_paper=of(paper_gap > 0),
        all_below=bool((gap > 0).all()),
        gap=gap.mean(),
        gap_paper=paper_gap.mean(),
        low=of(low),
        low_paper=of(paper_low),
        some_low=bool(low.any()),
        confidence=1 - read.made("30_naive")["delta"],
        extra=abs(extra.mean()),
        extra_word="more" if extra.mean() >= 0 else "fewer",
    )


@about("31_measures")
def measures(read: Files) -> Facts:
    frame, theirs = read("31_measures"), paper("tableC2_measures_dev")
    frame["measure"] = frame["method"].str.partition("/")[2]
    gap = (frame["consistency"] - 100 * frame["target"]) / 100
    used, printed = (
        part.pivot(index=["task", "target"], columns="measure", values="layers")
        for part in (frame, theirs)
    )
    best, chance = used.idxmin(axis=1), frame["measure"] == "random"
    saved = (1 - frame["first_exit"] / frame["layers"]).groupby(frame["measure"]).mean()
    return reach(gap, frame["consistency_std"] / 100) | dict(
        chance=of(gap[chance].round(9) >= 0),
        best=of(best == "meta"),
        best_paper=of(printed.idxmin(axis=1) == "meta"),
        best_most=mostly(best == "meta"),
        other=best[best != "meta"].mode().iloc[0] if (best != "meta").any() else "none",
        meta=used["meta"].mean(),
        random=used["random"].mean(),
        earlier=bool((used["meta"] < used["random"]).all()),
        saved=saved.mean(),
        most=saved.idxmax(),
        most_saved=saved.max(),
    )


@about("32_other_backbones")
def other_backbones(read: Files) -> Facts:
    frame, made = read("32_other_backbones"), read.made("32_other_backbones")
    used = frame.pivot(
        index=["backbone", "task", "measure", "epsilon"], columns="method", values="share_mean"
    )
    shared = used["shared"].unstack("measure").reindex(columns=["sm", "meta"])
    near = _near(set(frame["epsilon"]))
    saved = (shared["sm"] - shared["meta"]).xs(near, level="epsilon").groupby("backbone").mean()
    cheaper = used["shared"] < used["independent"]
    at = frame.query("backbone == @made['backbone'] and method == 'shared' and measure == 'meta'")
    at = at[at["epsilon"] == near].set_index("task")
    task = _example(at.index)
    depth = round(at["layers_mean"][task] / at["share_mean"][task])
    return _splits(frame) | dict(
        backbones=", ".join(written(name) for name in dict.fromkeys(frame["backbone"])),
        cheaper=of(cheaper),
        cheaper_most=mostly(cheaper),
        saved=spread(100 * saved.dropna(), "{:.1f}") if saved.notna().any() else None,
        saves=bool((saved.dropna() > 0).all()) if saved.notna().any() else None,
        epsilon=near,
        target=1 - near,
        task=written(task),
        backbone=written(made["backbone"]),
        layers=at["layers_mean"][task],
        depth=depth,
        untrained=None if read.has("32_other_backbones_c3") else "RoBERTa-large",
        few=at["layers_mean"][task] < 5 if (task, depth) == ("ag_news", 12) else None,
    )


@about("33_examples")
def examples(read: Files, exits: Ints, epsilon: float, depth: int) -> Facts:
    bands = read("33_examples_bands").dropna(subset=["agrees"])
    n = bands["inputs"].sum()
    full = bands[bands["inputs"] >= min(20, bands["inputs"].max())]  # a few inputs say nothing
    first, last = full.iloc[0], full.iloc[-1]
    counted = [
        [round(b["inputs"] * b["F is right"]), round(b["inputs"] * (1 - b["F is right"]))]
        for b in (first, last)
    ]
    agrees = (bands["agrees"] * bands["inputs"]).sum() / n
    known = "difficulty" in full
    return dict(
        n=n,
        epsilon=epsilon,
        target=1 - epsilon,
        depth=depth,
        layers=np.mean(exits),
        agreement=agrees,
        kept=agrees >= 1 - epsilon - 3 * (2 * epsilon * (1 - epsilon) / n) ** 0.5,
        first=first["exit layer"],
        last=last["exit layer"],
        first_share=first["inputs"] / n,
        last_share=last["inputs"] / n,
        easy=first["difficulty"] if known else None,
        hard=last["difficulty"] if known else None,
        harder=last["difficulty"] > first["difficulty"] if known else None,
        right_first=first["F is right"],
        right_last=last["F is right"],
        less_right=last["F is right"] < first["F is right"],
        p=fisher_exact(counted).pvalue,
    )


# --- 40 to 60: beyond


@about("40_beyond")
def beyond(read: Files) -> Facts:
    means = read("40_beyond").set_index(["task", "backbone", "epsilon", "method"])
    used = means["percent"].unstack("method")
    gain = 1 - used["first_exit"] / used["shared"]
    left = (used["shared"] - used["first_exit"]) / (used["shared"] - used["oracle"])
    slack = means["consistency"].unstack("method")
    slack = slack.sub(1).add(slack.index.get_level_values("epsilon"), axis=0)["first_exit"]
    cost = read("40_beyond_delta")
    e, strict = cost["epsilon"].min(), cost["delta"].min()
    at = cost[cost["epsilon"] == e].groupby(["method", "delta"])[["above", "layers"]].mean()
    rate = at["above"].xs(strict, level="delta")
    price = at["layers"].xs(strict, level="delta")
    size = read("40_beyond_size")
    few = _near(set(size["n"]), 100)
    many = size["n"].max()
    by_n = size[size["epsilon"] == e].query("method == 'first_exit'").groupby("n")["layers"].mean()
    return dict(
        pairs=len(used.droplevel("epsilon").index.unique()),
        gain=gain.median(),
        gain_range=spread(gain, "{:.0%}"),
        gains=bool((gain >= -1e-9).all()),
        margin=100 * abs(slack.min()),
        margin_side=side(slack.min()),
        left=left.median(),
        epsilon=e,
        delta=strict,
        first_rate=rate["first_exit"],
        pac_rate=rate["pac"],
        ltt_rate=rate["ltt"],
        rarer=bool(max(rate["pac"], rate["ltt"]) < rate["first_exit"]),
        pac=price["pac"] - price["first_exit"],
        ltt=price["ltt"] - price["first_exit"],
        few=few,
        many=many,
        few_layers=by_n[few],
        many_layers=by_n[many],
        enough=bool(by_n[few] <= by_n[many] + 5),
    )


@about("41_exact_law")
def exact_law(read: Files) -> Facts:
    frame = read("41_exact_law_checks")
    law, controls = (frame[frame["kind"] == kind] for kind in ("law", "control"))
    return dict(
        held=of(law["verdict"] == "holds"),
        holds=bool((law["verdict"] == "holds").all()),
        caught=of(controls["verdict"] == "caught"),
        all_caught=bool((controls["verdict"] == "caught").all()),
        distance=law["seen"].max(),
        allowed=law["high"].min(),
        mildest=controls["seen"].min(),
        alarm=law["false_alarm"].sum(),
        splits=read.made("41_exact_law")["splits"],
    )


@about("42_heads")
def heads(read: Files) -> Facts:
    saved, used = read("42_heads_saved").set_index("pair"), read("42_heads")
    saved.columns = saved.columns.astype(float)
    e = _near(saved.columns)
    kept = used[used["recipe"] == "distilled"]
    gap = kept["consistency"] - 1 + kept["epsilon"]
    areas = read("42_heads_by_layer").query("recipe == 'distilled'").dropna()
    used["share"] = used["layers"] / used["n_layers"]  # encoders differ in depth
    at = used[used["epsilon"] == e].pivot(index="pair", columns="recipe", values="share")
    mean = at.mean()
    return _seeds(read) | dict(
        pairs=len(saved),
        epsilon=e,
        saved=saved[e].mean(),
        saved_range=spread(saved[e], "{:.0%}"),
        saves=bool((saved[e] > 0).all()),
        least=saved.columns.min(),
        least_saved=saved[saved.columns.min()].mean(),
        gap=100 * abs(gap.min()),
        gap_side=side(gap.min()),
        kept=bool((gap >= -0.02).all()),
        better=(areas["auroc_meta"] > areas["auroc_sm"]).mean() if len(areas) else None,
        paper=mean["paper"],
        distilled=mean["distilled"],
        settled=mean["settled"],
        oracle=mean["oracle"],
    )


def _seeds(read: Files) -> Facts:
    """What seeds change beside what the recipe changes, where pairs have more than one seed."""
    names = ("seeds_range", "seeds_beaten", "seeds_clear")
    if not read.has("42_heads_seeds"):
        return dict.fromkeys(names)
    both = compared(read("42_heads_seeds")).dropna()
    larger = both["recipes"] > both["seeds"]
    found = (spread(both["seeds"], "{:.2f}"), of(larger), bool(larger.all()))
    return dict(zip(names, found if len(both) else (None,) * 3))


@about("43_choosing")
def choosing(read: Files) -> Facts:
    from cats.stats.choosing import APART, BAND, LOOKED

    risk, made = read("43_choosing").set_index(["n", "way"]), read.made("43_choosing")
    n, most = (risk.index.get_level_values("n")[i] for i in (0, -1))
    wide = 2.576  # a 99 % interval over trials
    looked, apart = (risk.loc[n, way] for way in (LOOKED, APART))
    missed = read("43_choosing_epsilon").groupby("method")[["missed", "somewhere"]].max()
    cost = read("43_choosing_cost")
    price = cost["band"] / cost["first_exit"] - 1
    return dict(
        n=n,
        most=most,
        task=written(made["task"]),
        epsilon=made["epsilon"],
        layers=made["layers"],
        looked=looked["risk_mean"],
        low=looked["risk_mean"] - wide * looked["risk_sem"],
        breaks=looked["risk_mean"] - wide * looked["risk_sem"] > made["epsilon"],
        apart=apart["risk_mean"],
        apart_kept=apart["risk_mean"] - wide * apart["risk_sem"] <= made["epsilon"],
        band_risk=risk.loc[most, BAND]["risk_mean"],
        pac=missed["somewhere"]["pac"],
        band=missed["somewhere"]["band"],
        band_rarest=missed["somewhere"].idxmin() == "band",
        price=spread(price, "{:.0%}"),
    )


@about("44_risk")
def risk(read: Files, n_layers: int, epsilon: float) -> Facts:
    means, groups = read("44_risk"), read("44_risk_groups")
    over = means["loss"] > means["alpha"]
    number = means[means["error"].notna()]
    row = number.loc[(number["alpha"] - 0.2).abs().idxmin()] if len(number) else None
    one, largest = (groups[f"worst class, {w}"] for w in ("one threshold", "the largest for all"))
    more = groups["layers, the largest for all"] - groups["layers, one threshold"]
    return dict(
        over=of(~over),
        all_kept=bool((means["loss"] <= 1.1 * means["alpha"]).all()),
        alpha=row["alpha"] if row is not None else None,
        loss=row["loss"] if row is not None else None,
        layers=row["layers"] if row is not None else None,
        n_layers=n_layers,
        error=row["error"] if row is not None else None,
        error_of_F=row["error_of_F"] if row is not None else None,
        bounded=row["error"] <= row["error_of_F"] + row["alpha"] if row is not None else None,
        target=1 - epsilon,
        one=spread(one, "{:.1%}"),
        one_fails=bool((one < 1 - epsilon).any()),
        largest=spread(largest, "{:.1%}"),
        groups_kept=bool((largest >= 1 - epsilon - 0.01).all()),
        more=spread(more),
    )


@about("45_monitor")
def monitor(read: Files) -> Facts:
    quiet, again = read("45_monitor_quiet"), read("45_monitor_again")
    delay, made = read("45_monitor"), read.made("45_monitor")
    rate = 100 * quiet["alarms"] / quiet["streams"]
    naive, marginal = quiet["way"] == "p-values", quiet["threshold"] == "first_exit"
    kept = ~naive & ~marginal
    hard = again[again["part"] == "hardest quarter"]
    mild = again[~again["part"].isin(["hardest quarter", "harder half"])]
    sudden = delay.query("part == 'hardest quarter' and shift == 'sudden'")
    most, watched = sudden["audit"].max(), made["inputs"] - made["begin"]

    def until(share: float) -> str:
        medians = sudden[np.isclose(sudden["audit"], share)]["median"]
        seen = medians[np.isfinite(medians)]
        late = f"more than {watched:,}"
        if len(seen) == len(medians):
            return spread(seen, "{:,.0f}")
        return f"{seen.min():,.0f} to {late}" if len(seen) else late

    return dict(
        epsilon=made["epsilon"],
        target=1 - made["epsilon"],
        delta=made["delta"],
        streams=quiet["streams"].iloc[0],
        kept=spread(rate[kept]),
        quiet=bool(quiet["within"][kept].all()),
        naive=spread(rate[naive]),
        naive_fails=not quiet["within"][naive].any(),
        few=read.made("45_monitor_quiet")["few"],
        marginal=spread(rate[marginal]),
        marginal_fails=not quiet["within"][marginal].any(),
        restored=spread(100 * again["recalibrated"]),
        restores=bool((again["recalibrated"] >= 1 - made["epsilon"]).all()),
        shifted=spread(100 * hard["shifted"], "{:.0f}"),
        recalibrated=100 * hard["recalibrated"].min(),
        most=most,
        soon=until(most),
        share=made["share"],
        late=until(made["share"]),
        cost=spread(100 * made["share"] * again["audit"] / again["layers"], "{:.0f}"),
        mild=spread(100 - 100 * mild["shifted"]),
    )


@about("50_your_own_model")
def your_own_model(
    read: Files, agrees: Bools, exits: Ints, epsilon: float, depth: int, bound: float, again: bool
) -> Facts:
    """`bound` is what agreement is at least with 99 % confidence, `again` whether the CAT answers
    the same once it is saved and loaded.
    """
    share = float(np.mean(agrees))
    error = (2 * epsilon * (1 - epsilon) / len(agrees)) ** 0.5
    return dict(
        n=len(agrees),
        epsilon=epsilon,
        target=1 - epsilon,
        agreement=share,
        kept=share >= 1 - epsilon - 3 * error,
        bound=bound,
        layers=np.mean(exits),
        depth=depth,
        fewer=np.mean(exits) < depth,
        again=again,
    )


@about("51_cascade")
def cascade(
    read: Files, agrees: Bools, exits: Ints, epsilon: float, calibrated: int, alone: float
) -> Facts:
    """`agrees` and `exits` of the texts held out, `calibrated` how many calibrated it, `alone` how
    often its first step agrees with F.
    """
    costs, n = read.made("51_cascade")["costs"], len(agrees)
    paid = np.cumsum(costs)[np.asarray(exits) - 1].mean() / costs[-1]
    chance = covered_law(calibrated, n, epsilon).cdf(np.sum(agrees))
    return dict(
        n=n,
        target=1 - epsilon,
        agreement=np.mean(agrees),
        chance=chance,
        kept=chance > ALARM,
        cost=paid,
        cheaper=paid < 1,
        alone=alone,
        answered=np.mean(np.asarray(exits) < len(costs)),
    )


@about("60_scale")
def scale(read: Files) -> Facts:
    needs, made = read("60_scale"), read.made("60_scale")
    tune = needs[needs["stage"] == "fine-tuning"]
    wide = needs.loc[needs["disk"].idxmax()]
    total = needs["hours"].sum()
    return dict(
        runs=len(tune),
        profile=made["profile"],
        hours=total,
        speed=made["speed"] / 1e12,
        share=tune["hours"].sum() / total,
        memory=tune["memory"].max(),
        gpu=made["gpu"],
        fits=tune["memory"].max() <= made["gpu"],
        disk=needs["disk"].sum(),
        widest=f"{written(wide['task'])} under {written(wide['model'])}",
        wide=wide["disk"],
    )


# --- the whole: for figures/README.md and the README

BACKBONES = {"mobilebert-uncased": "main", "bge-small-en-v1.5": "small"}


def _one(frame: pd.DataFrame, **where: Any) -> pd.Series:
    """The row where these columns have these values."""
    for column, value in where.items():
        close = np.isclose(frame[column], value) if isinstance(value, float) else None
        frame = frame[frame[column] == value if close is None else close]
    if not len(frame):
        raise LookupError(f"there is no row with {where}: run the notebook again")
    return frame.iloc[0]


@about("found")
def found(read: Files) -> Facts:
    """What was found, all in all, from the committed figures: nested by task."""
    ours = read("21_tasks_and_features_table_2")
    performance: dict[str, dict] = {}
    for row in ours.itertuples():
        both = performance.setdefault(row.task, {"paper": row[-1]})
        both[BACKBONES.get(row.backbone, row.backbone)] = row.F
    sweep, printed = read("22_consistency"), read("22_consistency_paper")
    swept, listed, exits = {}, {}, {}
    means, results = read("24_exit_layers_means"), read("23_tables")
    for task in dict.fromkeys(sweep["task"]):
        where = dict(task=task, method="shared", measure="meta")
        at, theirs = _one(sweep, **where, epsilon=0.05), _one(printed, **where, target=0.95)
        swept[task] = dict(
            consistency=100 * at["consistency_mean"],
            share=100 * at["layers_mean"] / PAPER_LAYERS,
            paper_consistency=theirs["consistency_paper"],
            paper_share=theirs["share_paper"],
        )
        first, shared = (
            _one(results, task=task, method=f"{method}/meta", target=0.95)
            for method in ("first_exit", "shared")
        )
        listed[task] = dict(
            shared=shared["layers"],
            first_exit=first["layers"],
            consistency=first["consistency"],
            paper=shared["layers_paper"],
        )
        low, high = (_one(means, task=task, method="shared", epsilon=e) for e in (0.05, 0.2))
        exits[task] = dict(low=low["layers"], high=high["layers"])
    ratio = 1 - results.pivot(index=["task", "target"], columns="method", values="layers").eval(
        "`first_exit/meta` / `shared/meta`"
    )
    naive, ltt = (
        _one(read("30_naive"), task="ag_news", method=method, target=0.95)
        for method in ("naive/meta", "ltt/meta")
    )
    measured = read("31_measures")
    by_measure = {
        task: {
            name: _one(measured, task=task, method=f"shared/{name}", target=0.95)
            for name in ("meta", "sm")
        }
        for task in ("ag_news", "vitaminc")
    }
    small = _one(
        read("32_other_backbones"),
        backbone="bge-small-en-v1.5",
        task="ag_news",
        method="shared",
        measure="meta",
        epsilon=0.05,
    )
    cost = read("43_choosing_cost").set_index("task")
    return dict(
        performance=performance,
        swept=swept,
        listed=listed,
        exits=exits,
        saved=dict(median=ratio.median(), low=ratio.min(), high=ratio.max()),
        naive=naive.to_dict(),
        ltt=ltt.to_dict(),
        measures={
            task: {name: row["layers"] for name, row in rows.items()}
            | {f"paper_{name}": row["layers_paper"] for name, row in rows.items()}
            for task, rows in by_measure.items()
        },
        small=small.to_dict(),
        meta=consistency(read),
        features=features(read),
        beyond=beyond(read),
        theorems=theorems(read),
        law=exact_law(read),
        heads=heads(read),
        choosing=choosing(read) | cost.T.to_dict(),
        risk=risk(read, n_layers=PAPER_LAYERS, epsilon=0.05),
        scale=scale(read),
        worth=_worth(read.folder),
        time=_time(read.folder),
        versus=_versus(read.folder),
        watched=monitor(read),
        cascade=_one(read("51_cascade"), method="first_exit", epsilon=0.1).to_dict(),
    )


@about("25_efficiency")
def efficiency(read: Files) -> Facts:
    frame, made = read("25_efficiency"), read.made("25_efficiency")
    curves = read("25_efficiency_by_exit").query("measure == 'meta'")
    many = next(name for name in frame if name.startswith("batch 32"))
    task = frame["task"].iloc[0]
    ours, shared = (
        _one(frame, task=task, method=f"{method}/meta", target=0.9)
        for method in ("first_exit", "shared")
    )
    architecture = made["architecture"]
    deep = curves[curves["architecture"] == architecture]["layer"].max()
    over, late = frame[many] / frame["share_32"], []
    for name, curve in curves.groupby("architecture", sort=False):
        l, times = len(curve), curve.set_index("layer")["time"]
        late.append(f"{times[l - 1] * l / (l - 1):.2f} ({name.split()[0]})")
    return dict(
        task=written(task),
        depth=made.get("layers", deep),  # of the tables, which the first record does not say
        architecture=architecture.split()[0],
        machine=made["machine"],
        repeats=made["repeats"],
        layers=ours["layers"],
        time=ours[many],
        shared_layers=shared["layers"],
        shared_time=shared[many],
        paper_time=None if np.isnan(shared["paper_time"]) else shared["paper_time"],
        cheaper=ours[many] < shared[many],
        p50=ours["p50"],
        p95=ours["p95"],
        over=over.median(),
        low=over.min(),
        high=over.max(),
        close=over.median() <= 1.10,
        late=", ".join(late),
    )


def unbeaten(frame: pd.DataFrame, least: float = 0.9) -> tuple[pd.DataFrame, int]:
    """The other ways that agree with F at `least` so often and that no CAT beats, being as often
    with F in less time; and how many such ways there are.
    """
    ours = frame[frame["what"].str.startswith("CAT")]
    others = frame[~frame.index.isin(ours.index) & (frame["what"] != "full model")]
    others = others[others["consistency"] >= least]
    beaten = [
        (
            (ours["consistency"] >= row.consistency) & (ours["relative_time"] < row.relative_time)
        ).any()
        for row in others.itertuples()
    ]
    return others[~np.array(beaten, bool)], len(others)


def named(ways: pd.DataFrame) -> str:
    """Ways and their settings, each way once: `int8; cut at a layer 1, 3`."""
    groups = ways.groupby("what", sort=False)["setting"]
    settings = {what: ", ".join(f"{one:g}" for one in found.dropna()) for what, found in groups}
    return "; ".join(f"{what} {found}".rstrip() for what, found in settings.items())


@about("26_comparison")
def comparison(read: Files) -> Facts:
    frame, made = read("26_comparison"), read.made("26_comparison")
    frame["setting"] = pd.to_numeric(frame["setting"], errors="coerce")
    ours = frame[frame["what"].str.startswith("CAT")]
    fastest = ours.loc[ours[ours["setting"] == 0.05]["relative_time"].idxmin()]
    plain, waits = (
        _one(frame, what=what, setting=0.05) for what in ("CAT", "waiting for the slowest")
    )
    others = frame[frame["setting"].isna() & (frame["what"] != "full model")]
    behind, compared = unbeaten(frame)
    kept = spread = None  # a record of before there were intervals or chances has none
    if "promised" in frame:
        spread = f"{100 * fastest['time_low']:.0f} to {100 * fastest['time_high']:.0f}"
    if "chance" in frame:
        chances = frame["chance"].dropna()
        kept = chances > ALARM / len(chances)  # by Bonferroni, however they hang together
    return dict(
        run=title(read.run),
        texts=made["texts"],
        repeats=made["repeats"],
        fastest=fastest["what"],
        time=100 * fastest["relative_time"],
        spread=spread,
        agreement=100 * fastest["consistency"],
        float32=100 * plain["relative_time"],
        waiting=100 * waits["relative_time"],
        quicker=fastest["relative_time"] < waits["relative_time"],
        others=compared,
        beaten=compared - len(behind),
        ahead=behind.empty,
        behind=named(behind) or None,
        kept=None if kept is None else f"{kept.sum()} of {len(kept)}",
        holds=None if kept is None else bool(kept.all()),
        alarm=ALARM,
        shares="; ".join(
            f"{row.what} {row.relative_time:.0%} and {row.consistency:.1%}"
            for row in others.itertuples()
        ),
    )


def _worth(folder: Path) -> Facts:
    """What Table 1's features are worth in layers, over the demo's runs."""
    worth, hidden = [], []
    for path in sorted(folder.glob("04_meta_classifiers_features-*-demo-0.csv")):
        layers = pd.read_csv(path).set_index("features")["layers"]
        without = layers.filter(like="without") - layers["all"]
        hidden.append(without.pop("without hidden"))
        worth.append(without.max())
    return dict(most=max(worth), low=min(hidden), high=max(hidden))


def _time(folder: Path) -> Facts:
    """Time at batch 32 beside layers, as one named run measured it on one architecture."""
    frame = pd.read_csv(folder / "25_efficiency.csv")
    many = next(name for name in frame if name.startswith("batch 32"))
    over = frame[many] / frame["share_32"]
    at = [
        _one(frame, task="ag_news", method=f"{method}/meta", target=0.9)
        for method in ("shared", "first_exit")
    ]
    made = Files(folder).made("25_efficiency")
    return dict(
        shared=at[0][many],
        first_exit=at[1][many],
        paper=at[0]["paper_time"],
        median=over.median(),
        low=over.min(),
        high=over.max(),
        architecture=made["architecture"].split()[0],
        **{name: made[name] for name in ("machine", "date", "repeats")},
    )


def _versus(folder: Path) -> Facts:
    """The CAT beside the same exits that wait for the slowest, on the real encoder."""
    frame = pd.read_csv(folder / "26_comparison-ag_news-bge-small-en-v1.5-0.csv")
    frame["setting"] = pd.to_numeric(frame["setting"], errors="coerce")
    ours, fast, waiting = (
        100 * _one(frame, what=what, setting=0.05)["relative_time"]
        for what in ("CAT", "CAT, bfloat16", "waiting for the slowest")
    )
    whole = 100 * _one(frame, what="bfloat16")["relative_time"]
    return dict(cat=ours, bfloat16=fast, whole=whole, waiting=waiting)
