"""The comparison a user would make: seconds against agreement with F, for the CAT on every body and
for what else makes a classifier faster (notebook 26).

    cats = {body: CAT.from_run(run, body=body) for body in BODIES}
    frame = compare(cats, ways(cats, rows, EPSILONS), rows, timed=128, repeats=6)
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from cats.model.bodies import FULL
from cats.paper import baselines, timing
from cats.paper.style import Look
from cats.runtime.audit import Audit
from cats.runtime.cat import CAT
from cats.runtime.loop import starting
from cats.stats.exits import first_above
from cats.stats.quantiles import Floats, Ints, clopper_pearson
from cats.stats.validity import covered_law
from cats.train.states import collate

EPSILONS = (0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002)
WAITING = (0.2, 0.1, 0.05, 0.02)
BATCH = 32
CHECKED, FEW = 0.05, 0.01  # where the CATs really run, and the share of rows that may differ then
LOOKS = {
    "full model": Look("full model", "#000000", "*"),
    "bfloat16": Look("bfloat16", "#0072B2", "v"),
    "int8": Look("int8", "#CC79A7", "D"),
    "ONNX": Look("ONNX", "#009E73", "P"),
    "ONNX, int8": Look("ONNX, int8", "#E69F00", "X"),
    "cut at a layer": Look("cut at a layer", "#999999", "s"),
    "waiting for the slowest": Look("waiting for the slowest", "#56B4E9", "^"),
    "CAT": Look("CAT", "#D55E00", "o"),
    "CAT, bfloat16": Look("CAT, bfloat16", "#882255", "p"),
    "CAT, int8": Look("CAT, int8", "#AA4499", "h"),
}


class Way(NamedTuple):
    """A way to a faster answer."""

    what: str  # a key of LOOKS
    setting: Any  # a layer, or ε, or ""
    prepare: Callable[[list[Any]], Callable[[], Any]]  # rows → a call that gives logits
    promised: float = np.nan  # agreement
    # scores of all layers (n, l-1) → exit layers: its answers are those of the layers of `body`
    exits: Callable[[Floats], Ints] | None = None
    body: str = FULL


def batches(cat: CAT, rows: list[Any], size: int) -> list[Any]:
    """Rows padded together, `size` at a time."""
    extra = cat.backbone.extra_padding
    parts = (rows[i : i + size] for i in range(0, len(rows), size))
    return [collate(cat.tokenizer, part, extra, pairs=True) for part in parts]


def ways(cats: Mapping[str, CAT], rows: list[Any], epsilons: Sequence[float]) -> list[Way]:
    """F first, then all others. `rows`, tokenised, are an example for ONNX."""
    cat = cats[FULL]
    model, l = cat.backbone.model, cat.backbone.n_layers
    never = np.full(l - 1, np.inf)
    plain = lambda batch: {name: value for name, value in batch.items() if name != "second"}

    def whole(answer: Callable[[Any], torch.Tensor]) -> Any:
        def prepare(rows: list[Any]) -> Any:
            given = [plain(batch) for batch in batches(cat, rows, BATCH)]
            return lambda: np.concatenate([answer(batch).numpy() for batch in given])

        return prepare

    def cut(k: int) -> Any:
        def prepare(rows: list[Any]) -> Any:
            given = batches(cat, rows, BATCH)
            leave = lambda j, scores, numbers: [j == k] * len(numbers)
            return lambda: cat.run(given, never, decide=leave)[0]

        return prepare

    def early(cat: CAT, thresholds: Floats) -> Any:
        def prepare(rows: list[Any]) -> Any:
            longest = max(len(row["input_ids"]) for row in rows)
            given = batches(cat, rows, starting(BATCH, longest))  # a CAT starts fewer at once
            return lambda: cat.run(given, thresholds, cat.measure)[0]

        return prepare

    def waiting(thresholds: Floats) -> Any:
        def prepare(rows: list[Any]) -> Any:
            given = batches(cat, rows, BATCH)
            _, exits, _ = cat.run(given, thresholds, cat.measure)
            last = [exits[i : i + BATCH].max() for i in range(0, len(rows), BATCH)]

            def run() -> None:
                for batch, k in zip(given, last):
                    cat.run([batch], never, decide=lambda j, s, numbers: [j == k] * len(numbers))

            return run

        return prepare

    def at(what: str, cat: CAT, epsilon: float, how: Callable[[Floats], Any]) -> Way:
        thresholds = cat.limits(cat.thresholds(epsilon))
        leave = lambda scores: first_above(scores, thresholds)
        # where nothing leaves early F itself answers
        body = FULL if np.isposinf(thresholds).all() else cat.body
        return Way(what, epsilon, how(thresholds), 1 - epsilon, leave, body)

    example = plain(batches(cat, rows[-2:], 2)[0])
    f_itself = torch.inference_mode()(lambda batch: model(**batch).logits)
    engines = baselines.onnx_in(model, example)
    found = [
        Way("full model", "", whole(f_itself), 1.0),
        Way("bfloat16", "", whole(baselines.bfloat16(model))),
        Way("int8", "", whole(baselines.int8(model))),
        Way("ONNX", "", whole(engines[32])),
        Way("ONNX, int8", "", whole(engines[8])),
    ]
    for k in range(1, l, max(1, l // 6)):
        leave = lambda scores, k=k: np.full(len(scores), k)
        found.append(Way("cut at a layer", k, cut(k), exits=leave))
    found += [
        at("waiting for the slowest", cat, epsilon, waiting)
        for epsilon in epsilons
        if epsilon in WAITING
    ]
    for body, one in cats.items():
        what = "CAT" if body == FULL else f"CAT, {body}"
        found += [at(what, one, epsilon, partial(early, one)) for epsilon in epsilons]
    return found


def all_layers(cat: CAT, rows: list[Any]) -> Audit:
    """What every layer of a CAT says of these rows: `logits` (n, l, C) and `scores` (n, l-1)."""
    notes = Audit(cat, [*range(len(rows))], cat.measure)
    stay = lambda k, scores, numbers: [False] * len(numbers)
    never = np.full(cat.backbone.n_layers - 1, np.inf)
    cat.run(batches(cat, rows, BATCH), never, cat.measure, stay, notes)
    return notes


def answers(cats: Mapping[str, CAT], ways: Sequence[Way], rows: list[Any]) -> list[Any]:
    """What every way says of each row, in their order: classes, or numbers.

    Those that leave at some layer say what that layer says: one pass through all layers of a body
    has the answers of all of them. At ε = CHECKED the CATs really run, too, and must say the same;
    but for few rows, whose scores are so near to the threshold that another batch rounds them to
    another exit.
    """
    table, found = cats[FULL].table, []
    said = lambda logits: logits[:, 0] if table.regression else logits.argmax(1)
    seen = {body: all_layers(cat, rows) for body, cat in cats.items()}
    for body, cat in cats.items():  # where a body's last layer is in doubt F itself answers
        doubt = cat.in_doubt(seen[body].logits[:, -1])
        seen[body].logits[doubt, -1] = seen[FULL].logits[doubt, -1]
    for way in tqdm(ways, desc="answers"):
        if way.exits is None:
            found.append(said(way.prepare(rows)()))
            continue
        there = seen[way.body]
        found.append(said(there.logits[np.arange(len(rows)), way.exits(there.scores) - 1]))
        if way.what.startswith("CAT") and way.setting == CHECKED:
            same = table.agree(said(way.prepare(rows)()), found[-1])
            assert same.mean() >= 1 - FEW, f"{way.what}: another answer in {(~same).sum()} rows"
    return found


def compare(
    cats: Mapping[str, CAT], ways: Sequence[Way], rows: list[Any], timed: int, repeats: int
) -> pd.DataFrame:
    """A row a way: agreement with F on all rows, with an interval of 95 % (Clopper and Pearson
    1934), and time relative to F's on `timed` of them, with one for the median of the repeats. Of a
    promise also the chance of so little agreement, over draws of calibration and test inputs.
    """
    n = len(cats[FULL].table)
    order = sorted(rows, key=lambda row: len(row["input_ids"]))
    some = sorted(rows[:timed], key=lambda row: len(row["input_ids"]))
    said_by = answers(cats, ways, order)
    calls = {(way.what, way.setting): way.prepare(some) for way in ways}
    f_itself = calls.pop(("full model", ""))
    ratios, whole = timing.in_turns(calls, f_itself, repeats)
    found = []
    for way, said in zip(ways, said_by):
        agree = int(cats[FULL].table.agree(said, said_by[0]).sum())
        ratio = ratios.get((way.what, way.setting), np.ones(repeats))
        time, low, high = timing.interval(ratio)
        found.append(
            {
                "what": way.what,
                "setting": way.setting,
                "promised": way.promised,
                "chance": chance(way, agree, len(rows), n),
                "consistency": agree / len(rows),
                "consistency_low": clopper_pearson(agree, len(rows), 0.025),
                "consistency_high": 1 - clopper_pearson(len(rows) - agree, len(rows), 0.025),
                "relative_time": time,
                "time_low": low,
                "time_high": high,
                "milliseconds": 1e3 * time * whole / len(some),
            }
        )
    return pd.DataFrame(found)


def chance(way: Way, agree: int, n_test: int, n: int) -> float:
    """The chance that a promise just kept, by n calibration inputs, shows at most so much agreement
    on n_test others: BetaBinomial. NaN where nothing is promised.
    """
    if not isinstance(way.setting, float) or np.isnan(way.promised):
        return np.nan
    return float(covered_law(n, n_test, way.setting).cdf(agree)) if agree < n_test else 1.0


def draw(axis: Any, frame: pd.DataFrame, of: str = "consistency") -> None:
    """Time against agreement seen or `promised`, on a scale that is even in the logarithm of what
    is missing; ε at the points of the best CAT, and intervals both ways.
    """
    most = 1 - 0.5 / 2000  # where all agreed
    up = lambda share: -np.log10(1 - np.minimum(share, most))
    for name, look in LOOKS.items():
        part = frame[(frame["what"] == name) & frame[of].notna()]
        if part.empty:
            continue
        line = "-" if len(part) > 1 else ""
        y = up(part[of])
        axis.plot(
            part["relative_time"],
            y,
            color=look.colour,
            marker=look.marker,
            markersize=11 if look.marker == "*" else 5,
            linestyle=line,
            label=look.name,
        )
        x_error = (
            part["relative_time"] - part["time_low"],
            part["time_high"] - part["relative_time"],
        )
        y_error = None
        if of == "consistency":
            y_error = y - up(part["consistency_low"]), up(part["consistency_high"]) - y
        axis.errorbar(
            part["relative_time"],
            y,
            y_error,
            [np.maximum(error, 0) for error in x_error],
            fmt="none",
            ecolor=look.colour,
            elinewidth=0.8,
            alpha=0.35,
        )
        if name.startswith("CAT") and of == "consistency" and name == best(frame):
            for label, x, height in labels(part["setting"], part["relative_time"], y):
                axis.annotate(label, (x, height), (3, -9), textcoords="offset points", fontsize=6)
    shares = [0.6, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998]
    shares = [share for share in shares if up(share) >= axis.get_ylim()[0] - 0.1]
    axis.set_yticks([*map(up, shares), up(1)], [*(f"{100 * s:g} %" for s in shares), "all"])


def labels(epsilons: Any, xs: Any, ys: Any) -> list[tuple[str, float, float]]:
    """What to write at which point: one label where points are too near for two.

    >>> labels([0.2, 0.1, 0.05], [0.023, 0.022, 0.041], [1.1, 1.1, 1.4])
    [('0.2, 0.1', 0.022, 1.1), ('0.05', 0.041, 1.4)]
    """
    found: list[tuple[str, float, float]] = []
    for epsilon, x, y in zip(epsilons, xs, ys):
        label = f"{epsilon:g}"
        if found and abs(found[-1][1] - x) < 0.02 and abs(found[-1][2] - y) < 0.05:
            label = f"{found.pop()[0]}, {label}"
        found.append((label, x, y))
    return found


def figure(frame: pd.DataFrame, of: str, title: str) -> Any:
    """One picture of `draw`."""
    made, axis = plt.subplots(figsize=(6.2, 4.0), layout="constrained")
    draw(axis, frame, of)
    seen = "agrees with the full model" if of == "consistency" else "promised to agree, at least"
    axis.set(xlabel="time relative to the full model (batch 32)", ylabel=seen, title=title)
    axis.set_xlim(0, None)
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return made


def best(frame: pd.DataFrame) -> str:
    """The CAT that takes the least time at ε = 0.05."""
    cats = frame[frame["what"].str.startswith("CAT") & (frame["setting"] == 0.05)]
    return str(cats.loc[cats["relative_time"].idxmin(), "what"])
