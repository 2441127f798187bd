"""Synthetic scores whose truth is known: the risk of G at any thresholds is a formula, not another
sample.

An input has one of a few difficulties u. Given u the layers are independent: layer k is consistent
with a probability that rises with k and falls with u, and its score is normal on the probit scale,
higher when the layer is consistent. Real layers are strongly dependent; independence is the price
of exact truth, and no guarantee of the paper needs it.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike
from scipy.interpolate import PchipInterpolator
from scipy.special import ndtr, ndtri

from cats.stats.quantiles import Bools, Floats, Ints
from cats.stats.table import ScoreTable


@dataclass(frozen=True)
class Synthetic:
    """A population of inputs as seen by a CAT.

    layers      l, the last of which is F
    classes     C; a wrong early prediction is one of the other classes
    skill       how far a consistent layer's score stands above an inconsistent one's; 0 is a
                useless measure
    difficulty  shares of the difficulties, from easy to hard
    right       P(F(x) = y) for the easiest inputs, and what is added to it for the hardest
    """

    layers: int = 12
    classes: int = 3
    skill: float = 1.5
    difficulty: tuple[float, ...] = (0.3, 0.25, 0.2, 0.15, 0.1)
    right: tuple[float, float] = field(default=(0.98, -0.3), repr=False)

    def __post_init__(self) -> None:
        if self.layers < 2 or self.classes < 2:
            raise ValueError(
                f"needs at least 2 layers and 2 classes, got {self.layers} and {self.classes}"
            )
        if min(self.difficulty) < 0 or abs(sum(self.difficulty) - 1) > 1e-9:
            raise ValueError(f"difficulty must hold shares that sum to 1, got {self.difficulty}")

    # --- the law, each array of shape (difficulties, l-1) ---

    @cached_property
    def _depth(self) -> Floats:
        return np.arange(1, self.layers) / self.layers

    @cached_property
    def _hardness(self) -> Floats:
        return (np.arange(len(self.difficulty)) / max(1, len(self.difficulty) - 1))[:, None]

    @cached_property
    def p_consistent(self) -> Floats:
        """P(F_k(x) = F(x)) by difficulty and layer."""
        return ndtr(0.8 + 2 * self._depth - 2.2 * self._hardness)

    @cached_property
    def _mean_if_wrong(self) -> Floats:
        return self._depth - self._hardness - 0.5

    @cached_property
    def p_right(self) -> Floats:
        """P(F(x) = y) by difficulty, (difficulties,)."""
        return self.right[0] + self.right[1] * self._hardness[:, 0]

    def _wrong_cdf(self, z: Floats) -> Floats:
        """P(score <= z, inconsistent)."""
        return (1 - self.p_consistent) * ndtr(z - self._mean_if_wrong)

    def _cdf(self, z: Floats) -> Floats:
        """P(score <= z)."""
        return self._wrong_cdf(z) + self.p_consistent * ndtr(z - self._mean_if_wrong - self.skill)

    # --- samples ---

    def draw(self, n: int, rng: np.random.Generator) -> tuple[Floats, Bools, Ints]:
        """Scores (n, l-1) in (0, 1), consistent (n, l-1), difficulties (n,)."""
        hard = rng.choice(len(self.difficulty), size=n, p=self.difficulty)
        consistent = rng.random((n, self.layers - 1)) < self.p_consistent[hard]
        z = (
            rng.standard_normal((n, self.layers - 1))
            + self._mean_if_wrong[hard]
            + self.skill * consistent
        )
        return ndtr(z), consistent, hard

    def table(self, n: int, seed: int = 0) -> ScoreTable:
        """A ScoreTable of n inputs; its softmax is a noisier view of the meta score."""
        rng = np.random.default_rng(seed)
        scores, consistent, hard = self.draw(n, rng)
        full = rng.integers(self.classes, size=n)  # what F says
        other = (
            full[:, None] + rng.integers(1, self.classes, size=(n, self.layers))
        ) % self.classes
        predictions = np.where(
            np.column_stack([consistent, np.ones(n, bool)]), full[:, None], other
        )  # (n, l)
        sure = np.column_stack([ndtri(scores), rng.normal(1.5, 1, n)]) + rng.normal(
            size=(n, self.layers)
        )
        logits = rng.normal(0, 0.1, (n, self.layers, self.classes))
        rows, columns = np.indices(predictions.shape)
        logits[rows, columns, predictions] = logits.max(axis=-1) + 0.2 + np.logaddexp(0, sure)
        right = rng.random(n) < self.p_right[hard]
        labels = np.where(
            right, full, (full + rng.integers(1, self.classes, size=n)) % self.classes
        )
        metadata = {"task": "synthetic", "split": "all", "seed": seed, "source": repr(self)}
        return ScoreTable(logits.astype(np.float32), scores, labels, metadata)

    # --- truth ---

    def _average(self, by_difficulty: Floats, given_right: bool) -> Floats:
        """Average over difficulties (the last axis); given F is right they are met in other
        proportions.
        """
        shares = np.asarray(self.difficulty) * (self.p_right if given_right else 1)
        return by_difficulty @ (shares / shares.sum())

    def _reaches(self, thresholds: ArrayLike) -> tuple[Floats, Floats]:
        """P(an input reaches layer k), (..., difficulties, l), and the thresholds on the probit
        scale.
        """
        thresholds = np.asarray(thresholds, dtype=float)
        if thresholds.shape[-1:] != (self.layers - 1,):
            raise ValueError(f"thresholds must end in ({self.layers - 1},), got {thresholds.shape}")
        z = ndtri(np.clip(thresholds, 0, 1))[..., None, :]
        stays = np.cumprod(self._cdf(z), axis=-1)
        return np.concatenate([np.ones_like(stays[..., :1]), stays], axis=-1), z

    def risk(self, thresholds: ArrayLike, given_right: bool = False) -> Floats:
        """P(G(x) != F(x)) at thresholds (..., l-1), exactly; `given_right`: among the inputs where
        F is right.
        """
        reaches, z = self._reaches(thresholds)
        leaves_wrong = (1 - self.p_consistent) - self._wrong_cdf(z)
        return self._average((reaches[..., :-1] * leaves_wrong).sum(axis=-1), given_right)

    def mean_layers(self, thresholds: ArrayLike) -> Floats:
        """The expected exit layer at thresholds (..., l-1)."""
        return self._average(self._reaches(thresholds)[0].sum(axis=-1), False)

    def coverage(self, t: ArrayLike, method: str) -> Floats:
        """P(V <= t) for the statistic V of a calibrator with a shared threshold, at each t.

        `shared` counts the inputs with an inconsistent layer alone, as Theorem 4.6 does.
        `independent` has a statistic a layer: t (..., l-1) gives P(score_k <= t_k | inconsistent at
        k).
        """
        t = np.asarray(t, dtype=float)
        if method == "independent":
            shares = np.asarray(self.difficulty)
            below = np.einsum(
                "...dk,d->...k", self._wrong_cdf(ndtri(np.clip(t, 0, 1))[..., None, :]), shares
            )
            return below / (shares @ (1 - self.p_consistent))
        if method == "first_exit":
            return np.where(t >= 1, 1.0, self._record_law(ndtri(np.clip(t, 1e-12, 1 - 1e-12))))
        z = ndtri(np.clip(t, 0, 1))[..., None, None]
        below = self._average(
            (self.p_consistent + self._wrong_cdf(z)).prod(axis=-1), False
        )  # P(V <= t)
        if method == "shared_all":
            return below
        if method == "shared":
            none = self._average(self.p_consistent.prod(axis=-1), False)
            return (below - none) / (1 - none)
        raise ValueError(f"no law for {method!r}; there are shared, shared_all and first_exit")

    @cached_property
    def _record_law(self) -> PchipInterpolator:
        """P(no inconsistent record exceeds t), interpolated in t on the probit scale.

        With H_k(m) = P(none among the first k layers, running maximum <= m) for m >= t:
        H_k(m) = P(score_k <= m) H_{k-1}(m) - ∫_t^m H_{k-1} d P(score_k <= x, inconsistent).
        """
        starts = np.linspace(-7.1, 8, 200)
        values = []
        for start in starts:
            m = np.linspace(start, 9, 800)
            cdf, wrong = (
                self._cdf(m[:, None, None]),
                self._wrong_cdf(m[:, None, None]),
            )  # (m, difficulties, l-1)
            survives = np.ones((len(m), len(self.difficulty)))
            for k in range(self.layers - 1):
                dies = (survives[1:] + survives[:-1]) / 2 * np.diff(wrong[..., k], axis=0)
                survives = cdf[..., k] * survives
                survives[1:] -= np.cumsum(dies, axis=0)
            values.append(self._average(survives[-1], False))
        return PchipInterpolator(starts, values)

    def harder(self) -> "Synthetic":
        """The same model met by the hardest inputs alone: a shift that breaks exchangeability."""
        return replace(self, difficulty=(0.0,) * (len(self.difficulty) - 1) + (1.0,))
