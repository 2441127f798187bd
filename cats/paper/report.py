"""The paper's tables with ours in the same layout: means over trials, and the published value in
brackets beside each.

    tables = store.tables("test")                                             # {task: ScoreTable}
    frame = report.trials(tables, ["shared/sm", "shared/meta"], [0.95, 0.9])  # one row a trial
    numbers = report.beside(frame, report.paper("table3_classification_test"))

A row of such a table is named as in data/paper: method/measure, or the method alone where the
measure plays no part.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import Markdown
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cats.paper import store, style
from cats.paper.places import DATA
from cats.paper.style import written
from cats.stats.calibrators import METHODS
from cats.stats.measures import NEEDS_CLASSES
from cats.stats.table import ScoreTable
from cats.stats.trials import evaluate

HEADINGS = {
    "consistency": "consist.",
    "bound": "bound",
    "accuracy": "acc.",
    "correlation": "corr.",
    "layers": "layers",
    "first_exit": "first_exit layers",
}
KEYS = ["task", "method", "target"]
PAPER_MODEL, PAPER_LAYERS = "albert-xlarge-v2", 24  # all tables of the paper are about it


def paper(name: str, method: str | None = None) -> pd.DataFrame:
    """A table of data/paper, its rows named method/measure; tables about one method alone do not
    name it, so do it here.
    """
    frame = pd.read_csv(DATA / "paper" / f"{name}.csv")
    if method:
        frame.insert(1, "method", method + "/" + frame.pop("measure"))
    printed = (
        pd.read_csv(DATA / "paper" / "guaranteed_accuracy.csv")
        .query("table == @name")
        .drop(columns="table")
    )
    return frame.merge(printed, how="left") if len(printed) else frame


def trials(
    tables: Mapping[str, ScoreTable],
    rows: Sequence[str],
    targets: Sequence[float],
    trials: int = 25,
    seed: int = 0,
    options: Any = None,
) -> pd.DataFrame:
    """`evaluate` for named rows of several tables, in per cent; one row per task, method, target
    and trial.

    Rows whose measure needs class probabilities are left out for regression. F's own performance,
    times the target, is what the paper calls guaranteed: the column `guaranteed`.
    """
    epsilons, frames = [round(1 - target, 9) for target in targets], []
    for task, table in tables.items():
        by_measure: dict[str, dict[str, str]] = {}
        for row in rows:
            method, _, measure = row.partition("/")
            by_measure.setdefault(measure or "meta", {})[method] = row
        for measure, methods in by_measure.items():
            if table.regression and measure in NEEDS_CLASSES:
                continue
            wanted = {
                method: given for method, given in (options or {}).items() if method in methods
            }
            with warnings.catch_warnings(record=True, action="always") as refused:
                frame = evaluate(
                    table, list(methods), measure, epsilons, trials, seed, options=wanted
                )
            for refusal in refused:  # said again, with the task's name
                warnings.warn(f"{task}: {refusal.message}", refusal.category, stacklevel=2)
            frame["method"] = frame["method"].map(methods)
            frames.append(
                frame.assign(task=task, n_layers=table.n_layers, full=full_performance(table))
            )
    frame = pd.concat(frames, ignore_index=True).drop(columns="measure")
    frame["target"] = (1 - frame.pop("epsilon")).round(9)
    percent = [
        column
        for column in ("consistency", "bound", "accuracy", "correlation", "full")
        if column in frame
    ]
    frame[percent] *= 100
    frame["guaranteed"] = frame["target"] * frame["full"]
    order = {row: i for i, row in enumerate(rows)}
    frame = frame.sort_values("method", key=lambda column: column.map(order), kind="stable")
    return frame.sort_values(
        "task", key=lambda column: column.map(list(tables).index), kind="stable"
    ).reset_index(drop=True)


def full_performance(table: ScoreTable) -> float:
    """F's performance; NaN without labels."""
    return np.nan if table.labels is None else table.performance(table.n_layers)


def beside(frame: pd.DataFrame, *published: pd.DataFrame) -> pd.DataFrame:
    """Means over trials, their standard deviations (`_std`) and the published values (`_paper`): a
    row per task, method, target.
    """
    fixed = ["n_layers", "full", "guaranteed"]
    values = [column for column in frame.columns if column not in KEYS + fixed + ["trial"]]
    groups = frame.groupby(KEYS, sort=False)
    numbers = pd.concat(
        [groups[fixed].first(), groups[values].mean(), groups[values].std().add_suffix("_std")],
        axis=1,
    )
    theirs = pd.concat(published).set_index(KEYS).add_suffix("_paper")
    return numbers.join(theirs).dropna(axis=1, how="all").reset_index()


def promises(row: str) -> bool:
    """Whether a row of a table promises anything: the oracle and the calibrators without a
    guarantee do not.
    """
    method = row.partition("/")[0]
    return method in METHODS and METHODS[method].guarantee != "none"


def layout(
    numbers: pd.DataFrame, values: Sequence[str], first: str = "method"
) -> tuple[pd.DataFrame, list[int]]:
    """The table a reader sees, `ours [paper's]` in each cell, and the positions of the rows that
    promise nothing.

    values  the columns shown for each task, in order; those a task does not have are left out
    first   heading of the first column

    As in the paper each target opens with a line of its own, with the guaranteed accuracy in
    parentheses.
    """
    rows, grey = [], []
    for target in sorted(set(numbers["target"]), reverse=True):
        part = numbers[numbers["target"] == target]
        rows.append(
            {first: f"target {target:.2f}"} | _cells(part, {"accuracy": "guaranteed"}, "({:.2f})")
        )
        for method in dict.fromkeys(part["method"]):
            if not promises(method):
                grey.append(len(rows))
            rows.append(
                {first: method}
                | _cells(part[part["method"] == method], dict(zip(values, values)), "{:.2f}")
            )
    columns = [_heading(task, value) for task in dict.fromkeys(numbers["task"]) for value in values]
    shown = (
        pd.DataFrame(rows).reindex(columns=[first, *columns]).dropna(axis=1, how="all").fillna("")
    )
    return (
        shown[[column for column in shown if column == first or (shown[column] != "").any()]],
        grey,
    )


def _heading(task: str, value: str) -> str:
    return f"{written(task)} {HEADINGS.get(value, value)}"


def _cells(part: pd.DataFrame, values: Mapping[str, str], form: str) -> dict[str, str]:
    """Text of the cells under each heading, from the rows of one target and perhaps one method: a
    row a task.
    """
    cells = {}
    for _, row in part.drop_duplicates("task").iterrows():
        for heading, value in values.items():
            if pd.notna(row.get(value)) and pd.notna(row.get(heading)):
                theirs = row.get(f"{value}_paper")
                cells[_heading(row["task"], heading)] = form.format(row[value]) + (
                    f" [{theirs:.2f}]" if pd.notna(theirs) else ""
                )
    return cells


def show(
    name: str,
    numbers: pd.DataFrame,
    values: Sequence[str],
    tasks: Sequence[str],
    parameters: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    first: str = "method",
) -> Any:
    """Save the table of some tasks as figures/NAME and return it to look at; a sentence instead
    where there is none.
    """
    part = numbers[numbers["task"].isin(tasks)]
    if part.empty:
        return Markdown(
            f"*No ScoreTable of {', '.join(written(task) for task in tasks)} is there, so"
            " this table is left out.*"
        )
    shown, grey = layout(part, values, first)
    inputs = {task: sha256 for task, sha256 in (inputs or {}).items() if task in set(part["task"])}
    groups = {
        _heading(task, value): (written(task), HEADINGS.get(value, value))
        for task in dict.fromkeys(part["task"])
        for value in values
    }
    data, best = part.dropna(axis=1, how="all"), _best(shown, grey, first)
    return style.save_table(name, data, shown, grey, parameters, inputs, heads=groups, bold=best)


def _best(shown: pd.DataFrame, grey: Sequence[int], first: str) -> list[tuple[int, str]]:
    """(row, column) of the fewest layers of each task and target, among rows that promise."""
    block = shown[first].str.startswith("target ").cumsum()
    counted = [column for column in shown if column.endswith("layers")]
    best = []
    for column in counted:
        layers = pd.to_numeric(shown[column].str.split().str[0], errors="coerce")
        layers = layers.drop(list(grey))
        for _, part in layers.dropna().groupby(block):
            best += [(row, column) for row in part.index[part == part.min()]]
    return best


def with_first_exit(frame: pd.DataFrame) -> pd.DataFrame:
    """Trials of `shared` with those of `first_exit` as one more column, measure by measure."""
    keys = [*KEYS, "trial"]
    first = frame[frame["method"].str.startswith("first_exit")]
    named = first["method"].str.replace("first_exit", "shared")
    first = first.assign(method=named, first_exit=first["layers"])[[*keys, "first_exit"]]
    return frame[frame["method"].str.startswith("shared")].merge(first, on=keys)


def trial_figure(
    frame: pd.DataFrame, methods: Sequence[str], seed: int = 0, model: str = ""
) -> Figure:
    """Every trial's consistency minus its target (dots) and the mean bound (ticks), a line a task
    and target, a colour a method; `model` stands above, as it is written.
    """
    targets = sorted(set(frame["target"]), reverse=True)
    lines = [(task, target) for task in dict.fromkeys(frame["task"]) for target in targets][::-1]
    looks = {method: style.METHODS[method.partition("/")[0]] for method in methods}
    jitter = np.random.default_rng(seed).uniform(-0.12, 0.12, frame["trial"].nunique())
    figure, axis = plt.subplots(figsize=(5.4, 0.9 + 0.42 * len(lines)), layout="constrained")
    groups = frame[frame["method"].isin(methods)].groupby(["task", "target", "method"])
    tick = dict(marker="|", markersize=15, markeredgewidth=2, linestyle="")
    for (task, target, method), part in groups:
        y = lines.index((task, target)) + (0.18 if method == methods[0] else -0.18)
        dots = dict(marker=".", linestyle="", color=looks[method].colour, alpha=0.6)
        axis.plot(part["consistency"] - 100 * target, y + jitter, **dots)
        axis.plot(part["bound"].mean() - 100 * target, y, color=looks[method].colour, **tick)
    axis.axvline(0, color="black", linewidth=0.8, zorder=0)
    axis.axvspan(-100, 0, color="#888888", alpha=0.18, linewidth=0, zorder=0)
    ends = (frame["consistency"] - 100 * frame["target"]).agg(["min", "max"])
    axis.set(xlabel="consistency − target, percentage points (shaded: below)", title=model)
    axis.set(xlim=(min(ends["min"], -1) - 0.5, ends["max"] + 0.5), ylim=(-0.6, len(lines) - 0.4))
    axis.set_yticks(range(len(lines)), [f"{written(task)}  {100 * t:g} %" for task, t in lines])
    marks = [
        Line2D([], [], marker=".", linestyle="", color=look.colour, label=method)
        for method, look in looks.items()
    ]
    tick |= dict(markersize=9, color="black", label="bound, mean")
    figure.legend(handles=[*marks, Line2D([], [], **tick)], loc="outside upper center", ncols=3)
    return figure


def layer_shares(
    numbers: pd.DataFrame, other: str | None = None, model: str = "the model"
) -> Figure:
    """Layers used as a share of the model's: ours (dots) beside the paper's (diamonds), a panel a
    task, a colour a target.

    other  a further column of layers to show as crosses: rows are then named by their measure
    model  whose layers they are, as it is written
    """
    tasks, methods = (
        list(dict.fromkeys(numbers["task"])),
        list(dict.fromkeys(numbers["method"]))[::-1],
    )
    colours = dict(
        zip(
            sorted(set(numbers["target"]), reverse=True),
            ("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
        )
    )
    kinds = {
        "ours": ("layers", "o", None),
        f"ours, {other}": (other, "x", None),
        "paper": ("layers_paper", "D", "none"),
    }
    kinds = {label: kind for label, kind in kinds.items() if kind[0] in numbers}
    size = (1.9 + 1.9 * len(tasks), 1.1 + 0.27 * len(methods))
    figure, axes = plt.subplots(
        1, len(tasks), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for axis, task in zip(axes[0], tasks):
        for i, (target, colour) in enumerate(colours.items()):
            part = numbers[(numbers["task"] == task) & (numbers["target"] == target)]
            y = part["method"].map(methods.index) + 0.32 * (
                0.5 - i / max(1, len(colours) - 1)
            )  # targets one under the other
            for column, marker, face in kinds.values():
                depth = PAPER_LAYERS if column == "layers_paper" else part["n_layers"]
                axis.plot(
                    100 * part[column] / depth,
                    y,
                    marker,
                    color=colour,
                    markerfacecolor=face,
                    markersize=4.5,
                )
        axis.set(
            title=written(task),
            xlim=(0, 104),
            xticks=(0, 50, 100),
            ylim=(-0.6, len(methods) - 0.4),
        )
    names = [_measure(method) for method in methods] if other else methods
    axes[0, 0].set_yticks(range(len(methods)), names)
    whose = f"{model}'s; paper: Albert-xlarge's" if "paper" in kinds else f"{model}'s"
    figure.supxlabel(f"layers used, % of {whose}", fontsize="medium")
    marks = [
        Line2D([], [], marker="s", linestyle="", color=colour, label=f"1 − ε = {target:.2f}")
        for target, colour in colours.items()
    ]
    for label, (_, marker, face) in kinds.items():
        marks.append(
            Line2D(
                [],
                [],
                marker=marker,
                linestyle="",
                color="black",
                markerfacecolor=face,
                label=label,
            )
        )
    figure.legend(
        handles=marks, loc="outside upper center", ncols=len(marks) if len(tasks) > 1 else 2
    )
    return figure


def _measure(row: str) -> str:
    """The measure of a row method/measure, as it is written."""
    measure = row.partition("/")[2]
    return style.MEASURES[measure].name if measure in style.MEASURES else measure


def rank_agreement(numbers: pd.DataFrame, value: str = "layers") -> pd.Series:
    """Spearman's correlation between ours and the paper's, over the rows of each task and target
    that both have.
    """
    if f"{value}_paper" not in numbers:
        return pd.Series(dtype=float)
    both = numbers.dropna(subset=[value, f"{value}_paper"])
    return both.groupby(["task", "target"], sort=False)[[value, f"{value}_paper"]].apply(
        lambda part: part.rank().corr().iloc[0, 1] if len(part) > 1 else np.nan
    )


def caveats(tables: Mapping[str, ScoreTable]) -> str:
    """One sentence that belongs to every comparison with the paper: whose numbers stand beside
    whose.
    """
    table = next(iter(tables.values()))
    backbone = table.metadata.get("backbone", "a smaller encoder")
    train = {task: table.metadata.get("rows", {}).get("train") for task, table in tables.items()}
    notes = [
        f"Our F is {written(backbone)} with {table.n_layers} layers;"
        f" the paper's is {written(PAPER_MODEL)} with {PAPER_LAYERS}"
    ]
    if "vitaminc" in tables and store.shipped():
        notes.append("our VitaminC models learn from a part of the official test set")
    elif train.get("vitaminc"):
        notes.append(f"VitaminC trains on {train['vitaminc']:,} rows where the paper has 370K")
    if train.get("ag_news"):
        notes.append(f"AG News trains on {train['ag_news']:,} rows where the paper has 115K")
    end = "So the patterns can be compared, the absolute numbers cannot."
    if backbone == PAPER_MODEL:
        end = "Where the rows are as many, the absolute numbers can be compared, too."
    return "; ".join(notes) + f". {end}"
