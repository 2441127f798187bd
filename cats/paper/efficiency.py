"""Numbers and pictures of 25: what a CAT saves in seconds (Table 5, Table C.3)."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cats.model import cost
from cats.paper import style, timing
from cats.paper.places import DATA
from cats.runtime.loop import starting
from cats.stats.calibrators import calibrate
from cats.stats.exits import exit_layers
from cats.stats.table import ScoreTable
from cats.stats.trials import split

SMALL = ("BERT 12 x 384", "MobileBERT 24 x 512")
LARGE = ("RoBERTa-large 24 x 1024", "ALBERT-xlarge 24 x 2048")
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7")
TARGETS = (0.90, 0.95)  # Table 5, Table C.3
METHODS = (
    "threshold/sm threshold/meta independent/meta shared/sm shared/meta first_exit/meta"
    " pac/meta ltt/meta"
).split()
MIRRORS = {"sentiment": "imdb", "claims": "vitaminc", "topics": "ag_news", "similarity": "stsb"}


def every(name: str) -> int:
    """Exits of a curve are measured at each so-manieth layer: a large model's are far apart."""
    return 12 if name in LARGE else 4


def measure(names: list[str], tokens: int, repeats: int) -> tuple[dict, pd.DataFrame]:
    """Time by exit layer of each architecture, {name: {measure: curve}}, and what a head and a meta
    classifier cost beside a layer. Large models are timed three times.
    """
    curves, costs = {}, []
    for name in names:
        cat = timing.untrained(name)
        large = name in LARGE
        times = min(3, repeats) if large else repeats
        curves[name] = timing.by_exit(cat, tokens, times, every(name), brief=large)
        layer = cost.layer_macs(cat.backbone, tokens)[0]
        head, meta = cost.head_macs(cat.heads)[0] / layer, cost.meta_macs(cat.meta) / layer
        costs.append((name, layer, head, meta))
        del cat
    columns = ["architecture", "MACs of a layer", "head / layer", "meta / layer"]
    return curves, pd.DataFrame(costs, columns=columns)


def curves_frame(curves: Mapping) -> pd.DataFrame:
    """Curves as rows: architecture, measure, layer, time."""
    parts = [
        pd.DataFrame({"architecture": name, "measure": by, "time": curve}).assign(
            layer=range(1, len(curve) + 1)
        )
        for name, both in curves.items()
        for by, curve in both.items()
    ]
    return pd.concat(parts)[["architecture", "measure", "layer", "time"]]


def curves_figure(curves: Mapping, tokens: int) -> Figure:
    """Time against exit layer, both as shares; markers where it was measured."""
    figure, axis = plt.subplots(figsize=(4.8, 3.1), layout="constrained")
    for (name, both), colour in zip(curves.items(), COLOURS):
        curve = both["meta"]
        marks = list(timing.measured(len(curve), every(name)) - 1)
        look = dict(marker="o", markersize=3, markevery=marks, color=colour, label=name)
        axis.plot(np.arange(1, len(curve) + 1) / len(curve), curve, **look)
    axis.plot([0, 1], [0, 1], color="black", linestyle=":", label="k / l")
    axis.set(xlabel="exit layer, as a share k / l", ylabel="time  $T_G(k)\\ /\\ T_F$")
    axis.set(xlim=(0, 1.02), ylim=(0, None), title=f"one input of {tokens} tokens")
    axis.legend(fontsize="small")
    return figure


def exits_of(tables: Mapping[str, ScoreTable], seed: int = 0) -> dict[tuple, np.ndarray]:
    """Exit layers by (task, target, method): thresholds from 80 % of a table, exits of the rest."""
    found = {}
    for task, table in tables.items():
        keep = split(len(table), 0, seed)
        for target in TARGETS:
            for name in METHODS:
                method, by = name.split("/")
                if table.regression and by == "sm":
                    continue
                scores, epsilon = table.scores(by), round(1 - target, 2)
                taus = calibrate(scores[keep], table.consistent[keep], epsilon, method=method)
                found[task, target, name] = exit_layers(scores[~keep], taus)
    return found


def replayed(
    cat: Any, exits: Mapping, inputs: int, tokens: int, repeats: int, depth: int
) -> dict[Any, timing.Replay]:
    """All exits replayed at batch 32 on an architecture, in turns with F, which has a turn for each
    task and target; methods with the same exits are timed once. Asserts that on equal inputs time
    follows layers, as far as intervals can tell.
    """
    l = cat.backbone.n_layers
    patterns = {key: np.resize(found * l // depth, inputs) for key, found in exits.items()}
    scored = {key: key[2].split("/")[1] for key in patterns}
    work = {key: (scored[key], pattern.tobytes()) for key, pattern in patterns.items()}
    first = {same: key for key, same in reversed(work.items())}  # the first with these exits
    own = {key: patterns[key] for key in patterns if first[work[key]] == key}
    batches = len(own) * -(-inputs // starting(32, tokens))  # that the CAT asks for, in a repeat
    beside = max(1, batches // len({key[:2] for key in exits}))
    timed = timing.replays(cat, own, tokens, 32, repeats, scored, beside=beside)
    found = {key: timed[first[same]] for key, same in work.items()}
    if repeats >= 6:  # fewer have no interval
        for task, target, _ in patterns:
            same = {key: value for key, value in found.items() if key[:2] == (task, target)}
            assert not timing.contradictions(same), "on equal inputs time follows layers"
    return found


def numbers(
    cat: Any, made: Mapping, exits: Mapping, curves: Mapping, found: Mapping
) -> pd.DataFrame:
    """Tables 5 and C.3, a row a task, target and method, with the paper's numbers beside ours.

    made  tokens, architecture, and the layers of the tables
    """
    tokens, architecture, depth = made["tokens"], made["architecture"], made["layers"]
    paper = pd.read_csv(DATA / "paper/table5_efficiency.csv")
    paper = paper.set_index(["task", "method", "target"])
    l, rows = cat.backbone.n_layers, []
    for (task, target, name), layers in exits.items():
        by, one = name.split("/")[1], layers * l // depth
        theirs = paper.reindex([(MIRRORS.get(task, task), name, target)]).iloc[0]
        reduction = cost.macs_reduction(
            cat.backbone, cat.heads, cat.meta, one, tokens, by == "meta"
        )
        alone = 100 * curves[architecture][by][one - 1]
        times = {
            f"batch 1, {key.split()[0]}": 100
            * both[by][layers * (len(both[by]) // depth) - 1].mean()
            for key, both in curves.items()
            if len(both["meta"]) % depth == 0
        }
        replay = found[task, target, name]
        rows.append(
            dict(task=task, target=target, method=name, layers=layers.mean())
            | dict(macs_reduction=reduction, **times)
            | dict(p50=np.median(alone), p95=np.quantile(alone, 0.95))
            | {f"batch 32, {architecture.split()[0]}": 100 * replay.ratio}
            | dict(paper_time=theirs["amortized_time_percent"])
            | dict(paper_macs_reduction=theirs["macs_reduction"])
            # layers of the inputs replayed, not of all
            | dict(share_32=100 * replay.share)
            | dict(zip(("low_32", "high_32"), 100 * np.array(replay.interval[1:])))
        )
    return pd.DataFrame(rows)


def shown(result: pd.DataFrame, target: float) -> pd.DataFrame:
    """One of the two tables as it is read: intervals in round brackets, the paper's in square."""
    part = result[result["target"] == target]
    many = next(name for name in part if name.startswith("batch 32,"))
    frame = part[["task", "method"]].replace(style.NAMES)
    frame["layers"] = part["layers"].map("{:.2f}".format)
    frame["MACs"] = [
        f"{ours:.1f}×" + ("" if np.isnan(theirs) else f" [{theirs:.1f}×]")
        for ours, theirs in zip(part["macs_reduction"], part["paper_macs_reduction"])
    ]
    for name in (name for name in part if name.startswith("batch 1,")):
        frame[f"{name} (%)"] = part[name].map("{:.0f}".format)
    spread = zip(part[many], part["low_32"], part["high_32"])
    frame[f"{many} (%)"] = [f"{v:.0f} ({low:.0f} to {high:.0f})" for v, low, high in spread]
    theirs = part["paper_time"].map("{:.0f}".format).where(part["paper_time"].notna(), "")
    frame["the paper's, A100 (%)"] = theirs
    return frame
