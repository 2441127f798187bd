"""What notebook 51 needs of a cascade: a cheap first step, costs in multiply-adds, its picture."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from cats.paper import style


class Student:
    """TF-IDF and logistic regression that learn what F says of some texts, so without labels.

    texts    what F was asked
    logits   (n, C) what it said; a class it never says gets the probability 0
    """

    def __init__(self, texts: Sequence[str], logits: np.ndarray) -> None:
        answers = np.argmax(logits, axis=1)
        self.classes, self.known = np.shape(logits)[1], np.unique(answers)
        self.model = make_pipeline(
            TfidfVectorizer(ngram_range=(1, 2), min_df=2), LogisticRegression(C=10)
        )
        if len(self.known) == 1:
            warnings.warn(
                f"F says class {self.known[0]} of all {len(answers)} texts: there is nothing to"
                " learn from it. Train F for longer, or take texts of every class",
                stacklevel=2,
            )
        else:
            self.model.fit(texts, answers)

    def predict_proba(self, texts: Sequence[str]) -> np.ndarray:
        """(n, C), as scikit-learn's classifiers give them."""
        found = np.zeros((len(texts), self.classes))
        found[:, self.known] = 1 if len(self.known) == 1 else self.model.predict_proba(texts)
        return found

    def macs(self, texts: Sequence[str]) -> float:
        """Multiply-adds, mean over texts: features that are not zero, times rows of weights."""
        if len(self.known) == 1:
            return 0.0
        features = self.model[:-1].transform(texts)
        return features.nnz / features.shape[0] * len(self.model[-1].coef_)


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
        look |= style.stroke(drawn[method].dash)
        left.plot(1 - part["epsilon"], part["consistency"], **look)
        right.plot(1 - part["epsilon"], 100 * part["cost"] / costs[-1], **look)
    left.axline((1, 1), slope=1, color="black", linewidth=0.8)
    right.axhline(100 * whole / costs[-1], color="black", linestyle=":", linewidth=0.8)
    left.set(xlabel="target  1 − ε", ylabel="consistency with F")
    right.set(xlabel="target  1 − ε", ylabel="cost (% of F's)", ylim=(0, None))
    figure.suptitle(", then ".join(names), fontsize=9)
    right.legend(loc="upper left")
    return figure
