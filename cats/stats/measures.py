"""Confidence measures: how sure an early layer is (Appendix C.2).

A measure is a function of the logits of the layers so far, (n, k, C), and gives the score of the
last of them, layer k: (n,). A table calls it for every early layer, a runtime on the layers it has.
Later layers cannot be read, so the two can only agree. One more is a function and a line:

    @measure("variance", needs_classes=True)
    def variance(logits):
        return softmax(logits[:, -1], axis=-1).var(axis=-1)

Every measure here lies in [0, 1] and is higher where the layer is more confident. Calibration only
reads the order, so an entropy may be turned round and rescaled at will; in [0, 1] the baseline
"score > 1-epsilon" makes sense for each.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_softmax

from cats.stats.quantiles import Floats

Function = Callable[..., Floats]


class Measure(NamedTuple):
    """A confidence measure: its function, and what a table or a runtime must know of it."""

    function: Function | None  # None: the scores come from elsewhere, as those of `meta` do
    needs_classes: bool = True  # whether it reads probabilities, which regression does not have
    reads: int | None = 1  # how many of the last layers it looks at; None: all
    at_runtime: bool = True  # whether a running model can exit by it
    wants: tuple[str, ...] = ()  # what else it takes: `early` (l-1), `tau` (for regression)
    share: bool = False  # whether it lies in [0, 1], and what counts is how near to 1: see `nines`

    def score(self, logits: NDArray[Any], early: int, tau: float) -> Floats:
        """The score (n,) of the last of these layers (n, k, C), in float64."""
        if self.function is None:
            raise ValueError("this measure is no function of the logits: its scores are given")
        if self.reads is not None:
            logits = logits[:, -self.reads :]
        known = {"early": early, "tau": tau}
        extra = {name: known[name] for name in self.wants}
        return np.asarray(self.function(logits.astype(float), **extra), dtype=float)


MEASURES: dict[str, Measure] = {}


def measure(
    name: str,
    *,
    needs_classes: bool = True,
    reads: int | None = None,
    at_runtime: bool = True,
    share: bool = False,
) -> Callable[[Function], Function]:
    """Register a function of the logits so far, (n, k, C) → (n,), under a name.

    needs_classes  whether it reads class probabilities: then regression tables refuse it
    reads          how many of the last layers it looks at, if not all: it is given no more
    at_runtime     whether a running model can exit by it
    share          whether it lies in [0, 1] and is a smooth function of the logits: then what
                   rounding does to it is counted in `nines`

    The function may also take `early`, the number of early layers, and `tau`, the margin within
    which two regression outputs count as equal, by these names.
    """

    def register(function: Function) -> Function:
        wants = tuple(inspect.signature(function).parameters)[1:]
        if not set(wants) <= {"early", "tau"}:
            raise TypeError(f"a measure takes logits, and perhaps early and tau, not {wants}")
        MEASURES[name] = Measure(function, needs_classes, reads, at_runtime, wants, share)
        return function

    return register


def find_measure(name: str) -> Measure:
    """The measure of that name; says what there is when there is none."""
    if name not in MEASURES:
        raise ValueError(f"unknown measure {name!r}; there are {', '.join(MEASURES)}")
    return MEASURES[name]


NINES = 5.0  # as many as scores in float32 can be told apart by


def nines(scores: ArrayLike) -> Floats:
    """How many nines a score in [0, 1] has, -log10(1 - score), at most NINES.

    >>> nines([0.9, 0.99, 1]).round(6).tolist()
    [1.0, 2.0, 5.0]

    Rounding of logits moves a score of 0.6 by a hundred times as much as one of 0.996, and their
    nines by as much: whoever has to leave room for rounding leaves far less of it in nines. Their
    order is the scores', so calibration may read either.
    """
    left = np.maximum(1 - np.asarray(scores, dtype=float), 10**-NINES)
    return np.asarray(-np.log10(left), dtype=float)


def from_nines(values: ArrayLike) -> Floats:
    """The score that has so many nines; `inf` where none is known to have more."""
    values = np.asarray(values, dtype=float)
    return np.where(values < NINES, 1 - 10**-values, np.inf)


# the meta classifier's M_k
MEASURES["meta"] = Measure(None, needs_classes=False, reads=None, share=True)


@measure("sm", reads=1, share=True)
def p_max(logits: Floats) -> Floats:
    """p max, the softmax response of layer k (SM in the paper)."""
    return np.exp(log_softmax(logits[:, -1], axis=-1).max(axis=-1))


@measure("diff", reads=1, share=True)
def p_difference(logits: Floats) -> Floats:
    """The difference between the two largest probabilities (Table 1)."""
    top = np.sort(np.exp(log_softmax(logits[:, -1], axis=-1)), axis=-1)[..., -2:]
    return top[..., 1] - top[..., 0]


@measure("entropy", reads=1, share=True)
def low_entropy(logits: Floats) -> Floats:
    """1 - H(p_k)/log C."""
    log_p = log_softmax(logits[:, -1], axis=-1)
    return 1 + (np.exp(log_p) * log_p).sum(axis=-1) / np.log(logits.shape[-1])


@measure("kl", reads=2, share=True)
def small_change(logits: Floats) -> Floats:
    """exp(-KL(p_{k-1} || p_k)): 1 where a layer changes nothing. Layer 1 follows no other and
    scores 0.
    """
    if logits.shape[1] == 1:
        return np.zeros(len(logits))
    log_p = log_softmax(logits[:, -2:], axis=-1)
    divergence = (np.exp(log_p[:, 0]) * (log_p[:, 0] - log_p[:, 1])).sum(axis=-1)
    return np.exp(-np.maximum(divergence, 0))


MEASURES["random"] = Measure(None, needs_classes=False, at_runtime=False)  # for comparison


@measure("patience", needs_classes=False)
def streak(logits: Floats, early: int, tau: float) -> Floats:
    """How many layers in a row have kept their prediction, as a share of l-1 (Zhou et al. 2020)."""
    if logits.shape[2] == 1:
        same = np.abs(np.diff(logits[..., 0], axis=1)) <= tau  # (n, k-1)
    else:
        predicted = logits.argmax(axis=-1)
        same = predicted[:, 1:] == predicted[:, :-1]
    return np.cumprod(same[:, ::-1], axis=1).sum(axis=1) / early


OLD_NAMES = ("sm", "diff", "entropy", "kl", "patience")


def __getattr__(name: str) -> Any:
    """Names from before there was a registry: `NEEDS_CLASSES`, and `sm(logits)` to `patience`, each
    on the logits (n, l, C) of all layers, of which the last is F: (n, l-1).
    """
    if name == "NEEDS_CLASSES":
        return tuple(key for key, entry in MEASURES.items() if entry.needs_classes)
    if name in OLD_NAMES:
        return lambda logits, tau=0.5: over_layers(name, logits[:, :-1], tau)
    raise AttributeError(f"module 'cats.stats.measures' has no attribute {name!r}")


def over_layers(name: str, logits: NDArray[Any], tau: float) -> Floats:
    """The scores of all early layers (n, l-1) from their logits (n, l-1, C)."""
    entry, early = find_measure(name), logits.shape[1]
    columns = [entry.score(logits[:, : k + 1], early, tau) for k in range(early)]
    for column in columns:
        if column.shape != (len(logits),):
            raise ValueError(
                f"measure {name!r} must give one score an input, shape ({len(logits)},), got"
                f" {column.shape}"
            )
    return np.stack(columns, axis=1)
