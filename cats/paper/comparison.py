"""The comparison a user would make: seconds against agreement with F, for the CAT on every body and
for what else makes a classifier faster (notebook 26).

    cats = {body: CAT.from_run(run, body=body) for body in BODIES}
    frame = compare(cats["float32"], ways(cats, rows, EPSILONS), rows)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from cats.model.bodies import FULL
from cats.paper import baselines, timing
from cats.paper.style import Look
from cats.runtime.cat import CAT
from cats.runtime.loop import starting
from cats.stats.quantiles import clopper_pearson
from cats.train.states import collate

EPSILONS = (0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002)
WAITING = (0.2, 0.1, 0.05, 0.02)
BATCH = 32
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
    alike: tuple[str, Any] | None = None  # what and setting of the way whose answers are the same


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

    def early(cat: CAT, epsilon: float) -> Any:
        thresholds = cat.thresholds(epsilon) + cat.margin(cat.measure, "first_exit")

        def prepare(rows: list[Any]) -> Any:
            given = batches(cat, rows, starting(BATCH))  # a CAT of this size starts fewer at once
            return lambda: cat.run(given, thresholds, cat.measure)[0]

        return prepare

    def waiting(epsilon: float) -> Any:
        thresholds = cat.thresholds(epsilon) + cat.margin(cat.measure, "first_exit")

        def prepare(rows: list[Any]) -> Any:
            given = batches(cat, rows, BATCH)
            _, exits, _ = cat.run(given, thresholds, cat.measure)
            last = [exits[i : i + BATCH].max() for i in range(0, len(rows), BATCH)]

            def run() -> None:
                for batch, k in zip(given, last):
                    cat.run([batch], never, decide=lambda j, s, numbers: [j == k] * len(numbers))

            return run

        return prepare

    example = plain(batches(cat, rows[-2:], 2)[0])
    f_itself = torch.inference_mode()(lambda batch: model(**batch).logits)
    found = [
        Way("full model", "", whole(f_itself), 1.0),
        Way("bfloat16", "", whole(baselines.bfloat16(model))),
        Way("int8", "", whole(baselines.int8(model))),
        Way("ONNX", "", whole(baselines.onnx(model, example))),
        Way("ONNX, int8", "", whole(baselines.onnx(model, example, bits=8))),
    ]
    found += [Way("cut at a layer", k, cut(k)) for k in range(1, l, max(1, l // 6))]
    found += [
        Way("waiting for the slowest", epsilon, waiting(epsilon), 1 - epsilon, ("CAT", epsilon))
        for epsilon in epsilons
        if epsilon in WAITING
    ]
    for body, one in cats.items():
        what = "CAT" if body == FULL else f"CAT, {body}"
        found += [Way(what, epsilon, early(one, epsilon), 1 - epsilon) for epsilon in epsilons]
    return found


def compare(
    cat: CAT, ways: Sequence[Way], rows: list[Any], timed: int = 256, repeats: int = 10
) -> pd.DataFrame:
    """A row a way: agreement with F on all rows, with an interval of 95 % (Clopper and Pearson
    1934), and time relative to F's on `timed` of them, with one for the median of the repeats.
    """
    order = sorted(rows, key=lambda row: len(row["input_ids"]))
    some = sorted(rows[:timed], key=lambda row: len(row["input_ids"]))
    key = lambda way: (way.what, way.setting)
    own = tqdm([way for way in ways if way.alike is None], desc="answers")
    answers = {key(way): way.prepare(order)() for way in own}
    calls = {key(way): way.prepare(some) for way in ways}
    f_itself = calls.pop(("full model", ""))
    ratios, whole = timing.in_turns(calls, f_itself, repeats)
    table, found = cat.table, []
    said = lambda logits: logits[:, 0] if table.regression else logits.argmax(1)
    full = said(answers["full model", ""])
    for way in ways:
        agree = int(table.agree(said(answers[way.alike or key(way)]), full).sum())
        time, low, high = timing.interval(ratios.get(key(way), np.ones(repeats)))
        found.append(
            {
                "what": way.what,
                "setting": way.setting,
                "promised": way.promised,
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
            for epsilon, x, height in zip(part["setting"], part["relative_time"], y):
                axis.annotate(
                    f"{epsilon:g}", (x, height), (3, -9), textcoords="offset points", fontsize=6
                )
    shares = [0.6, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998]
    shares = [share for share in shares if up(share) >= axis.get_ylim()[0] - 0.1]
    axis.set_yticks([*map(up, shares), up(1)], [*(f"{100 * s:g} %" for s in shares), "all"])


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
