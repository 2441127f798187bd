"""Early predictions and their confidence for the rows still there, layer after layer: F_k and M_k
of cats.model.exits, one layer at a time.
"""

import copy
import math
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cats.model.exits import Heads, Meta
from cats.stats.measures import find_measure

if TYPE_CHECKING:
    from cats.runtime.cat import CAT


LARGE = 745.0  # log-odds where the other probabilities vanish


class Exit(NamedTuple):
    """What the runtime needs of one layer's head and meta classifier."""

    w_p: Tensor  # (width, d_e)
    b_p: Tensor
    w_o: Tensor  # (d_e, C), temperature folded in
    b_o: Tensor
    w_1: Tensor  # (inputs, units), and two units more where they read log-odds
    b_1: Tensor
    w_2: Tensor  # (units,)
    b_2: Tensor
    w_h: Tensor | None = None  # (k-1 times C, d_e), of heads with history

    @classmethod
    def of(cls, heads: Heads, meta: Meta, k: int) -> "Exit":
        return cls(**heads.layer(k), **meta.layer(k))


def top_two(logits: list[float]) -> tuple[int, float, float, float]:
    """The class, its probability, its distance to the second largest, and its log-odds, of one row
    of logits.

    In plain Python: an operation on tensors after a layer of F, when its code is no longer in the
    caches, takes longer than a few classes do (3 to 6 % of a layer for one input alone).
    """
    if len(logits) == 2:  # what follows, in a third of the time
        odds = math.exp(-abs(logits[1] - logits[0]))
        total = 1 + odds
        return int(logits[1] > logits[0]), 1 / total, (1 - odds) / total, abs(logits[1] - logits[0])
    top = max(logits)
    odds_of = [math.exp(value - top) for value in logits]
    which = logits.index(top)
    odds_of.sort()
    rest = sum(odds_of[:-1])
    total = 1 + rest
    return which, 1 / total, (1 - odds_of[-2]) / total, -math.log(rest) if rest else LARGE


@cache
def indicators(classes: int) -> list[list[float]]:
    """Every class as M_k reads it, by one number fewer than classes.

    >>> indicators(3)
    [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    """
    return np.eye(classes)[:, 1:].tolist()


class Scorer:
    """What scoring remembers of some rows, and their scores at the next layer.

    It runs on the host, whatever device F runs on: heads are tiny, and the decision to leave is
    taken there anyway. Products by torch and not by NumPy, whose BLAS has threads of its own, which
    go on spinning and take the cores from F's layers.

    A row with a NaN scores NaN, which exceeds no threshold: it goes on to F.
    """

    def __init__(self, cat: "CAT", measure: str, n: int) -> None:
        heads, meta = cat.heads, cat.meta
        self.cat, self.measure, self.found = cat, measure, find_measure(measure)
        self.history, self.early, self.d_e = heads.history, heads.early, heads.d_e
        self.classes, self.odds = heads.n_outputs, meta.odds
        self.predictions = indicators(self.classes)
        # whether a layer's score depends on the layers before it: then heads run at every layer
        remembers = "history" not in meta.drop if measure == "meta" else self.found.reads != 1
        self.needs_all = self.history or remembers
        # the meta classifiers' inputs, in one buffer; their history fills up as layers pass
        self.x = np.zeros((n, meta.inputs), np.float32)
        self._view()
        # logits of the layers before, for heads with history
        self.past = np.zeros((n, 0), np.float32) if self.history else None
        # logits of the layers so far (rows, k, C), as many as the measure reads
        self.so_far = np.zeros((n, 0, self.classes), np.float32)

    def _view(self) -> None:
        """Parts of the buffer under names of their own: the same memory."""
        self.inputs, numbers = torch.from_numpy(self.x), self.early + self.d_e
        self.hidden = self.inputs[:, self.early : numbers]
        self.now = self.x[:, numbers:]  # prediction and margins

    def keep(self, rows: list[int]) -> None:
        """Forget the rows that have left."""
        for name, value in self._remembered():
            setattr(self, name, value[rows])
        self._view()

    def copy(self, rows: list[int]) -> "Scorer":
        """What is remembered of these rows, for itself."""
        found = copy.copy(self)
        found.keep(rows)
        return found

    def join(self, other: "Scorer") -> None:
        """Take in the rows of another, which has come as far."""
        for name, value in self._remembered():
            setattr(self, name, np.concatenate([value, getattr(other, name)]))
        self._view()

    def _remembered(self) -> list[tuple[str, np.ndarray]]:
        names = ("x", "past", "so_far")
        values = [(name, getattr(self, name)) for name in names]
        return [(name, value) for name, value in values if isinstance(value, np.ndarray)]

    def __call__(self, k: int, x: Tensor) -> tuple[list[list[float]], list[float]]:
        """Logits with temperature, row by row, and scores, of layer k, counted from 1, from what
        heads read (rows, width) in float32.
        """
        exit = self.cat.exits[k - 1]
        hidden = torch.addmm(exit.b_p, x, exit.w_p)
        if self.history:
            hidden += torch.from_numpy(self.past) @ exit.w_h
        # in the place where a meta classifier reads it
        hidden = torch.tanh(hidden, out=self.hidden)
        logits = torch.addmm(exit.b_o, hidden, exit.w_o).tolist()
        if self.history:
            self.past = np.concatenate([self.past, np.array(logits, np.float32)], axis=1)
        if self.measure == "meta":
            return logits, self._meta(k, logits, exit)
        if self.measure in ("sm", "diff"):
            place = 1 if self.measure == "sm" else 2
            return logits, [top_two(row)[place] for row in logits]
        now = np.array(logits, np.float32)
        self.so_far = np.concatenate([self.so_far, now[:, None]], axis=1)
        if self.found.reads is not None:
            self.so_far = self.so_far[:, -self.found.reads :]
        scores = self.found.score(self.so_far, self.early, self.cat.table.tau)
        return logits, np.where(np.isnan(now).any(1), np.nan, scores).tolist()

    def _meta(self, k: int, logits: list[list[float]], exit: Exit) -> list[float]:
        """M_k: features and Meta of cats.model.exits for one layer."""
        now = self.now
        if self.classes == 1:
            confidence: Any = logits
            now[:] = confidence
        else:
            found = [top_two(row) for row in logits]
            end = 4 if self.odds else 3  # pmax, pdiff and perhaps odds
            now[:] = [(*self.predictions[one[0]], *one[1:end]) for one in found]
            confidence = [one[1:2] for one in found]
        units = torch.addmm(exit.b_1, self.inputs, exit.w_1)
        self.x[:, k - 1 : k] = confidence
        return torch.addmv(exit.b_2, units.relu_(), exit.w_2).sigmoid_().tolist()
