"""ScoreTable: what every layer of one model said about every input of one split, in one file.

It is the only interface between the expensive half of the repository (training, torch) and the
cheap one (calibration, figures, NumPy). The file is safetensors with the metadata in its header; a
hash of the arrays is kept there and checked.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax

from cats._io import digest, read_arrays, write_arrays
from cats.stats.measures import find_measure, over_layers
from cats.stats.quantiles import Bools, Floats

FORMAT = "cats.ScoreTable/1"
TAU = 0.5  # the margin within which two regression outputs count as equal (Section 5.3)


def performance(predictions: NDArray[Any], labels: NDArray[Any], regression: bool = False) -> float:
    """How good predictions (n,) are: accuracy, for regression Pearson's correlation."""
    if regression:
        return float(np.corrcoef(predictions, labels)[0, 1])
    return float((predictions == labels).mean())


def native(values: ArrayLike) -> NDArray[Any]:
    """An array in this machine's byte order: safetensors writes no other."""
    array = np.asarray(values)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


class ScoreTable:
    """Logits of all layers, meta scores, labels, and where they come from.

    logits    (n, l, C) float; the full model F is the last layer, unless there is `full`; C = 1
              means regression
    meta      (n, l-1) float; the meta classifier's belief that F_k(x) = F(x); None where there is
              no such classifier and scores come from the logits or from elsewhere
    labels    (n,) int for classification, float for regression; None for unlabelled inputs
    metadata  task, backbone, split, seed, source, versions, and whatever else says how the table
              was made; `costs`, l numbers, where steps cost not alike: see `costs`
    tau       the margin of consistency for regression
    full      (n, C) float; what F says, where the layers are those of a faster body that is only
              nearly F. Consistency is then with these, of all l layers

    Layers are counted from 1: `predictions[:, k-1]` is F_k and `predictions[:, -1]` is F.
    """

    def __init__(
        self,
        logits: ArrayLike,
        meta: ArrayLike | None = None,
        labels: ArrayLike | None = None,
        metadata: Mapping[str, Any] | None = None,
        tau: float = TAU,
        full: ArrayLike | None = None,
    ) -> None:
        self.logits: NDArray[Any] = native(logits)
        self.full: NDArray[Any] | None = None if full is None else native(full)
        self.meta: NDArray[Any] | None = None if meta is None else native(meta)
        self.labels: NDArray[Any] | None = None if labels is None else native(labels)
        self.metadata, self.tau = dict(metadata or {}), float(tau)
        self._check()

    def _check(self) -> None:
        shapes = f"logits {self.logits.shape}"
        shapes += ", no meta" if self.meta is None else f", meta {self.meta.shape}"
        if self.logits.ndim != 3 or self.logits.shape[1] < 2 or self.logits.shape[2] < 1:
            raise ValueError(f"logits must have shape (n, l, C) with l >= 2 layers: {shapes}")
        if self.meta is not None and self.meta.shape != (len(self), self.n_layers - 1):
            raise ValueError(
                f"meta must have shape (n, l-1) = {(len(self), self.n_layers - 1)}: {shapes}"
            )
        if self.full is not None and self.full.shape != (len(self), self.n_classes):
            raise ValueError(
                f"full must have shape (n, C) = {(len(self), self.n_classes)}, got"
                f" {self.full.shape}"
            )
        for name, array in (("logits", self.logits), ("meta", self.meta), ("full", self.full)):
            if array is None:
                continue
            if array.dtype.kind != "f":
                raise TypeError(f"{name} must be floating point, got {array.dtype}")
            if not np.isfinite(array).all():
                raise ValueError(
                    f"{name} hold NaN or infinite values: the table would give wrong exits"
                )
        if not self.tau >= 0:
            raise ValueError(f"tau must be at least 0, got {self.tau}")
        if self.labels is None:
            return
        if self.labels.shape != (len(self),):
            raise ValueError(
                f"labels must have shape (n,) = ({len(self)},), got {self.labels.shape}"
            )
        if self.regression:
            if self.labels.dtype.kind not in "fiu" or not np.isfinite(self.labels).all():
                raise ValueError("labels of a regression table must be finite numbers")
        elif self.labels.dtype.kind not in "iu":
            raise TypeError(
                f"labels of a classification table must be integers, got {self.labels.dtype}"
            )
        elif len(self) and not (0 <= self.labels.min() and self.labels.max() < self.n_classes):
            raise ValueError(
                f"labels must lie in 0..{self.n_classes - 1}, got"
                f" {self.labels.min()}..{self.labels.max()}"
            )

    def __len__(self) -> int:
        return len(self.logits)

    def __repr__(self) -> str:
        kind = "regression" if self.regression else f"{self.n_classes} classes"
        name = " ".join(
            str(self.metadata[key]) for key in ("task", "backbone", "split") if key in self.metadata
        )
        return (
            f"ScoreTable({name or 'unnamed'}: {len(self)} inputs, {self.n_layers} layers, {kind})"
        )

    @property
    def n_layers(self) -> int:
        """l, the full model's number of layers."""
        return self.logits.shape[1]

    @property
    def n_classes(self) -> int:
        return self.logits.shape[2]

    @property
    def regression(self) -> bool:
        return self.n_classes == 1

    @property
    def costs(self) -> Floats | None:
        """What an input has cost when it leaves at each layer, (l,): the sum of `costs` in the
        metadata up to there; None where each layer costs the same.
        """
        if "costs" not in self.metadata:
            return None
        costs = np.asarray(self.metadata["costs"], float)
        if costs.shape != (self.n_layers,) or not (np.isfinite(costs) & (costs >= 0)).all():
            raise ValueError(
                f"costs must be {self.n_layers} finite numbers of at least 0, one a step, got"
                f" {self.metadata['costs']!r}"
            )
        return costs.cumsum()

    @property
    def predictions(self) -> NDArray[Any]:
        """What each layer predicts, (n, l): a class, or a number for regression."""
        return self.logits[..., 0].astype(float) if self.regression else self.logits.argmax(axis=-1)

    @property
    def reference(self) -> NDArray[Any]:
        """What F predicts, (n,)."""
        if self.full is None:
            return self.predictions[:, -1]
        return self.full[:, 0].astype(float) if self.regression else self.full.argmax(axis=-1)

    @property
    def _compared(self) -> int:
        """How many layers may differ from F: l-1, or l where the last is not F."""
        return self.n_layers - (self.full is None)

    @property
    def consistent(self) -> Bools:
        """Whether F_k(x) = F(x), (n, l-1); for regression |F_k(x) - F(x)| <= tau. For a body that
        is only nearly F (n, l): its last layer may differ, too.
        """
        return self.agree(self.predictions[:, : self._compared], self.reference[:, None])

    def surely_consistent(self, off: ArrayLike) -> Bools:
        """`consistent`, and it would be so still were each logit of layer k off by up to off[k-1]:
        for a runtime that computes them in other arithmetic, `off` (l,) bounding the difference.
        """
        allowed = np.asarray(off, dtype=float)[: self._compared]
        logits = self.logits[:, : self._compared].astype(float)
        if self.regression:
            return np.abs(logits[..., 0] - self.reference[:, None]) <= self.tau - allowed
        top = np.sort(logits, axis=-1)[..., -2:]
        return self.consistent & (top[..., 1] - top[..., 0] > 2 * allowed)

    @property
    def correct(self) -> Bools:
        """Whether each layer is right, (n, l); for regression within tau of the label."""
        if self.labels is None:
            raise ValueError("this table has no labels: accuracy needs labelled inputs")
        return self.agree(self.predictions, self.labels[:, None])

    @property
    def metric(self) -> str:
        """What performance is called: accuracy, or correlation for regression."""
        return "correlation" if self.regression else "accuracy"

    def performance(self, layer: int) -> float:
        """The performance of F_k on the labels; of F itself at layer l."""
        if self.labels is None:
            raise ValueError("this table has no labels: performance needs labelled inputs")
        return performance(self.predictions[:, layer - 1], self.labels, self.regression)

    def agree(self, left: NDArray[Any], right: NDArray[Any]) -> Bools:
        """Whether predictions count as equal: the same class, or numbers within tau."""
        return np.abs(left - right) <= self.tau if self.regression else left == right

    def scores(self, measure: str = "meta", seed: int = 0) -> Floats:
        """The confidence of every early layer, (n, l-1), higher = more confident; `seed` is for
        `random` alone.
        """
        entry = find_measure(measure)
        if measure == "meta":
            if self.meta is None:
                raise ValueError(
                    "this table has no meta scores: use another measure, such as sm, or add the"
                    " scores of a meta classifier"
                )
            return self.meta.astype(float)
        if measure == "random":
            return np.random.default_rng(seed).random((len(self), self.n_layers - 1))
        if entry.needs_classes and self.regression:
            raise ValueError(
                f"{measure} needs class probabilities and this is a regression table: use meta or"
                " patience"
            )
        return over_layers(measure, self.logits[:, :-1], self.tau)

    def losses(self, kind: str | None = None) -> Floats:
        """What it costs that layer k answers in place of F, (n, l-1), for `cats.calibrate_risk`;
        (n, l) for a body that is only nearly F.

        kind  "difference": |F_k - F|, for regression (the default there); "variation": the total
              variation between the probabilities p_k and p_F, in [0, 1] (the default for classes);
              "disagreement": 1 where F_k and F do not agree, else 0
        """
        kind = kind or ("difference" if self.regression else "variation")
        if kind == "disagreement":
            return (~self.consistent).astype(float)
        if kind == "difference" and self.regression:
            return np.abs(self.predictions[:, : self._compared] - self.reference[:, None])
        if kind == "variation" and not self.regression:
            p = softmax(self.logits.astype(float), axis=-1)
            of_f = p[:, -1] if self.full is None else softmax(self.full.astype(float), axis=-1)
            differences = np.abs(p[:, : self._compared] - of_f[:, None])
            return np.minimum(differences.sum(axis=-1) / 2, 1.0)
        raise ValueError(
            f"no loss {kind!r} for {'regression' if self.regression else 'classes'}: there are"
            " disagreement, difference (regression) and variation (classes)"
        )

    def take(self, rows: ArrayLike) -> "ScoreTable":
        """The table of these rows (indices or a mask)."""
        rows = np.asarray(rows)
        meta = None if self.meta is None else self.meta[rows]
        labels = None if self.labels is None else self.labels[rows]
        full = None if self.full is None else self.full[rows]
        return ScoreTable(self.logits[rows], meta, labels, self.metadata, self.tau, full)

    def _arrays(self) -> dict[str, NDArray[Any]]:
        arrays = {"logits": self.logits, "meta": self.meta, "labels": self.labels}
        arrays["full"] = self.full
        return {
            name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None
        }

    @property
    def sha256(self) -> str:
        """A hash of the arrays and of tau: two tables with the same hash give the same exits."""
        return digest(self._arrays(), before=repr(self.tau).encode())

    def save(self, path: str | Path) -> Path:
        """Write the table to one safetensors file, whole or not at all."""
        header = {
            "format": FORMAT,
            "tau": self.tau,
            "sha256": self.sha256,
            "metadata": self.metadata,
            "about": digest(self.metadata),
        }
        write_arrays(path, self._arrays(), header)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "ScoreTable":
        """Read a table back; refuses a file that is empty, cut short, changed, or no ScoreTable."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no ScoreTable at {path}")
        arrays, header = read_arrays(path)
        if header.get("format") != FORMAT:
            raise ValueError(
                f"{path} is not a ScoreTable: its format is {header.get('format')!r}, expected"
                f" {FORMAT!r}"
            )
        if not {"logits"} <= set(arrays) <= {"logits", "meta", "labels", "full"}:
            raise ValueError(
                f"{path} holds {sorted(arrays)}, a ScoreTable holds logits and perhaps meta, labels"
                " and full"
            )
        try:
            table = cls(**arrays, metadata=header["metadata"], tau=header["tau"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: the parts of this table do not fit together: {error}"
            ) from None
        # tables of an older version have no hash of their metadata
        changed = header.get("about", digest(table.metadata)) != digest(table.metadata)
        if changed or table.sha256 != header.get("sha256"):
            raise ValueError(
                f"{path} was changed after it was written: its hash does not match, make the table"
                " again"
            )
        return table
