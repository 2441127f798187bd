"""Rows on their way through the layers: who leaves after which layer, who waits, who goes on
together (Algorithm 1, PREDICT).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cats.model.backbone import State
from cats.runtime.scorer import Scorer

SHORT = 512  # tokens of a batch: see `starting`
# decide(k, scores of the rows left, their numbers): who of them leaves after layer k
Decide = Callable[[int, list[float], list[int]], list[bool]]


@dataclass
class Cohort:
    """Rows on their way through the layers together."""

    state: State
    rows: list  # their numbers
    scorer: "Scorer"  # what scoring remembers of them


class Loop:
    """One call of `run`: which rows leave after which layer, and what they leave with.

    Rows, scores and thresholds are plain lists: after a layer of F caches are cold, and few things
    are as quick then.
    """

    def __init__(self, cat: Any, thresholds: Any, decide: Decide | None, audit: Any = None) -> None:
        self.autocast, self.decide, self.reads = cat.autocast, decide, cat.heads.reads
        self.audit = audit  # of some rows: it asks for the scores of all layers
        given, l = np.asarray(thresholds, dtype=float), cat.backbone.n_layers
        self.thresholds = given.tolist()
        if given.shape != (l - 1,) or any(map(math.isnan, self.thresholds)):
            raise ValueError(
                f"a CAT of {l} layers needs {l - 1} thresholds, none of them NaN, got"
                f" {thresholds!r}"
            )
        # where nothing leaves early F itself answers, not a body that is only nearly F
        nobody = not decide and all(threshold == math.inf for threshold in self.thresholds)
        self.backbone = cat.backbone if nobody else cat.engine
        self.last = (
            l - 1
            if decide or audit
            else max((k for k in range(1, l) if self.thresholds[k - 1] < math.inf), default=0)
        )  # nothing leaves early after it
        # whether F itself is asked where a body's last layer is in doubt, and for which rows
        self.asks_f, self.in_doubt = cat.nearly and not (nobody or decide), cat.in_doubt
        self.doubtful: list[int] = []
        self.sums = self.last > 0 and self.reads != "cls"  # whether heads read more than [CLS]
        self.cohorts: list[Cohort] = []  # rows on their way
        self.room = 0  # the most that may run together
        self.left: list[
            tuple[Any, ...]
        ] = []  # (row, logits, layer, confidence) of those that have left

    def begin(self, cohort: Cohort) -> None:
        """Take in new rows, and go on until there is room for more."""
        self.room = max(self.room, len(cohort.rows))
        self.cohorts.append(cohort)
        self.go(few=self.room // 2, many=2 * self.room)

    def wait(self, cohort: Cohort, room: int) -> None:
        """Take in rows that are in no hurry: they go on at the end, or when too many wait."""
        self.room = max(self.room, room)
        self.cohorts.append(cohort)
        self.go(few=self.room, many=2 * self.room)

    def end(self) -> None:
        """Go on until all have left."""
        self.go(few=self.room, many=0)

    def go(self, few: int, many: int) -> None:
        """Cohorts of more than a few rows go on. If there is none but many rows wait, the cohort
        furthest behind goes on to the next, and so on.
        """
        layer = lambda cohort: cohort.state.layer
        while self.cohorts:
            full = [cohort for cohort in self.cohorts if len(cohort.rows) > few]
            if full:
                cohort, rows = max(full, key=layer), few
            elif sum(len(cohort.rows) for cohort in self.cohorts) > many:
                cohort, rows = min(self.cohorts, key=layer), 0
            else:
                return
            self.advance(
                cohort,
                rows,
                min(
                    (layer(other) for other in self.cohorts if layer(other) > layer(cohort)),
                    default=None,
                ),
            )
            if cohort.rows:
                cohort.state = self.backbone.compact(cohort.state)
                for other in self.cohorts:
                    if (
                        other is not cohort
                        and layer(other) == layer(cohort)
                        and len(other.rows) + len(cohort.rows) <= self.room
                    ):
                        self.join(cohort, other)
            self.cohorts = [cohort for cohort in self.cohorts if cohort.rows]

    def advance(self, cohort: Cohort, rows: int = 0, layer: int | None = None) -> None:
        """On through the layers until at most so many rows are left, or after `layer`."""
        backbone, l = self.backbone, self.backbone.n_layers
        while len(cohort.rows) > rows and cohort.state.layer < (layer or l):
            k = cohort.state.layer + 1
            cohort.state = backbone.step(cohort.state, k)
            if k <= self.last and (
                self.decide
                or self.audit
                or cohort.scorer.needs_all
                or self.thresholds[k - 1] < math.inf
            ):
                self.leave(cohort, k)
        if cohort.rows and cohort.state.layer == l:
            answers = backbone.finish(cohort.state).float().tolist()
            if self.audit:
                self.audit.note(l, cohort.rows, answers)
            if self.asks_f:
                doubts = self.in_doubt(np.array(answers))
                self.doubtful += [row for row, doubt in zip(cohort.rows, doubts) if doubt]
            self.left += [(row, logits, l, 1.0) for row, logits in zip(cohort.rows, answers)]
            cohort.rows = []

    def score(self, scorer: Scorer, k: int, state: State) -> tuple[list[Any], list[float]]:
        """Early predictions and scores of a state after layer k."""
        x = self.backbone.read(state, self.reads)
        if x.is_cpu and x.dtype is torch.float32 and not self.autocast:
            return scorer(k, x)
        # F may run elsewhere and in lower precision, heads and scores do not
        with torch.autocast("cpu", enabled=False):
            return scorer(k, x.float().cpu())

    def leave(self, cohort: Cohort, k: int) -> None:
        """The rows that exit at layer k leave the cohort."""
        answers, scores = self.score(cohort.scorer, k, cohort.state)
        if self.audit:
            self.audit.note(k, cohort.rows, answers, scores)
        threshold = self.thresholds[k - 1]
        leaves = (
            self.decide(k, scores, cohort.rows)
            if self.decide
            else [score > threshold for score in scores]
        )
        if any(leaves):
            if self.audit:
                self.audit.left(k, cohort, leaves, self.room)
            self.left += [
                (row, logits, k, score)
                for row, logits, score, left in zip(cohort.rows, answers, scores, leaves)
                if left
            ]
            stays = remaining(leaves)
            cohort.rows = [cohort.rows[i] for i in stays]
            if stays:
                cohort.scorer.keep(stays)
                cohort.state = self.backbone.keep(cohort.state, stays)

    def join(self, cohort: Cohort, other: Cohort) -> None:
        """Take in the rows of another cohort that has come as far."""
        cohort.scorer.join(other.scorer)
        cohort.state, cohort.rows, other.rows = (
            self.backbone.join(cohort.state, other.state),
            cohort.rows + other.rows,
            [],
        )

    def results(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Logits (n, C), exit layers and confidences, by row number."""
        _, logits, exits, confidences = (
            zip(*sorted(self.left, key=lambda one: one[0])) if self.left else [()] * 4
        )
        return (
            np.array(logits, np.float32).reshape(len(exits), self.backbone.num_labels),
            np.array(exits, int),
            np.array(confidences, float),
        )


def remaining(leaves: list[bool]) -> list[int]:
    """The numbers of the rows that stay, the last ones in the places of those that leave: so that
    most need not be moved.

    >>> remaining([False, True, False, False, True, False])
    [0, 5, 2, 3]
    """
    stays = [i for i, left in enumerate(leaves) if not left]
    last = iter(reversed(stays))
    return [next(last) if left else i for i, left in enumerate(leaves[: len(stays)])]


def starting(batch_size: int, tokens: int) -> int:
    """Rows of at most so many tokens that start together where F would take `batch_size`. Three in
    four: the rest of F's memory is for rows that wait, and for the gaps that batches of all sizes
    leave. Of a short batch all: it takes little memory, and fewer rows hardly take less time (of 32
    rows of 8 tokens in bfloat16 a CAT took a tenth less time so).
    """
    return batch_size if batch_size * tokens <= SHORT else max(1, 3 * batch_size // 4)
