"""What notebook 51 needs of a cascade: costs of its steps in multiply-adds, its picture, and its
reading.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import betabinom

from cats.paper import style
from cats.runtime.cascade import Cascade
from cats.runtime.inputs import Predictions
from cats.stats.quantiles import Bools
from cats.stats.validity import coverage_law

ALARM = 1e-3  # probability of "no" in the reading where the promise is kept


def linear_macs(pipeline: Any, texts: Sequence[Any]) -> float:
    """Multiply-adds of a linear model on TF-IDF features, mean over texts: features that are not
    zero, times classes.
    """
    features = pipeline[:-1].transform(texts)
    return features.nnz / features.shape[0] * len(pipeline[-1].coef_)


def encoder_macs(model: str | Path, texts: Sequence[Any]) -> float:
    """Multiply-adds of a sequence classifier on an input as long as these texts are on average."""
    from cats.model import cost  # it needs torch
    from cats.model.backbone import Backbone
    from cats.train.states import encode, load_tokenizer

    backbone = Backbone.from_pretrained(model)
    columns = [list(texts)] if isinstance(texts[0], str) else [list(one) for one in zip(*texts)]
    rows = encode(load_tokenizer(model), columns, backbone.max_tokens)
    tokens = round(np.mean([len(row["input_ids"]) for row in rows]))
    return sum(cost.ends_macs(backbone, tokens)) + sum(cost.layer_macs(backbone, tokens))


def cascade_figure(means: pd.DataFrame, costs: Sequence[float], names: Sequence[str]) -> Figure:
    """Left: consistency against its target; right: cost, in per cent of F's, by method; dotted: all
    steps run.

    means   method, epsilon, consistency, cost;   costs   of each step
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    drawn, whole = style.looks(means["method"]), sum(costs)
    for method, part in means.groupby("method", sort=False):
        look = dict(color=drawn[method].colour, marker=drawn[method].marker, label=method)
        left.plot(1 - part["epsilon"], part["consistency"], **look)
        right.plot(1 - part["epsilon"], 100 * part["cost"] / costs[-1], **look)
    left.axline((1, 1), slope=1, color="black", linewidth=0.8)
    right.axhline(100 * whole / costs[-1], color="black", linestyle=":", linewidth=0.8)
    left.set(xlabel="target  1 − ε", ylabel="consistency with F")
    right.set(xlabel="target  1 − ε", ylabel="cost (% of F's)", ylim=(0, None))
    figure.suptitle(", then ".join(names), fontsize=9)
    right.legend(loc="upper left")
    return figure


def cascade_reading(
    cascade: Cascade, out: Predictions, agrees: Bools, epsilon: float, first_alone: float
) -> str:
    """Notebook 51's result in words, from its numbers."""
    paid, last = cascade.cost(out.exit_layers), cascade.costs[-1]
    sure = (out.exit_layers < len(cascade.costs)).mean()
    law = coverage_law(len(cascade.calibration), epsilon).args  # of what a calibration set covers
    chance = betabinom(len(agrees), *law).cdf(agrees.sum())
    return (
        "| claim | here | holds |\n|---|---|---|\n"
        f"| G = F on at least {1 - epsilon:.0%}, on average over calibration sets |"
        f" {agrees.mean():.1%} of {len(agrees):,} texts held out; so few or fewer come with"
        f" probability {chance:.2f} where the promise is just kept |"
        f" {'yes' if chance > ALARM else 'no'} |\n"
        f"| it costs less than F | {100 * paid.mean() / last:.1f} % of F's multiply-adds |"
        f" {'yes' if paid.mean() < last else 'no'} |\n\nThe cheap model alone agrees with F on"
        f" {first_alone:.1%}. Where it is sure enough it answers, which it does for {sure:.1%} of"
        " the texts, and F sees the others: the promise is that of F with early heads, and so are"
        " the calibrators. A text that no step but the last can answer pays for all of them, so a"
        " cheap step is worth its cost where it answers more often than it costs a share of F."
    )
