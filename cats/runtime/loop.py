"""Rows on their way through the layers: who leaves after which layer, who waits, who goes on
together (Algorithm 1, PREDICT).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from cats.model.backbone import State
from cats.runtime.scorer import Scorer


@dataclass
class Flight:
    """Rows on their way through the layers together."""

    state: State
    rows: list  # their numbers
    scorer: "Scorer"  # what scoring remembers of them


class Loop:
    """One call of `run`: which rows leave after which layer, and what they leave with.

    Rows, scores and thresholds are plain lists: after a layer of F caches are cold, and few things
    are as quick then.
    """

    def __init__(self, cat, thresholds, decide):
        self.backbone, self.autocast, self.decide = cat.backbone, cat.autocast, decide
        self.reads = cat.heads.reads
        bars = np.asarray(thresholds, dtype=float)
        l, self.bars = self.backbone.n_layers, bars.tolist()
        if bars.shape != (l - 1,) or [bar for bar in self.bars if bar != bar]:
            raise ValueError(
                f"a CAT of {l} layers needs {l - 1} thresholds, none of them NaN, got"
                f" {thresholds!r}"
            )
        self.last = (
            l - 1
            if decide
            else max((k for k in range(1, l) if self.bars[k - 1] < math.inf), default=0)
        )  # nothing leaves early after it
        self.flights, self.room = [], 0  # rows on their way, and the most that may run together
        self.left = []  # (row, logits, layer, confidence) of those that have left

    def begin(self, flight):
        """Take in new rows, and go on until there is room for more."""
        self.room = max(self.room, len(flight.rows))
        self.flights.append(flight)
        self.go(few=self.room // 2, many=2 * self.room)

    def end(self):
        """Go on until all have left."""
        self.go(few=self.room, many=0)

    def go(self, few, many):
        """Flights of more than a few rows go on. If there is none but many rows wait, the flight
        furthest behind goes on to the next, and so on.
        """
        layer = lambda flight: flight.state.layer
        while self.flights:
            full = [flight for flight in self.flights if len(flight.rows) > few]
            if full:
                flight, rows = max(full, key=layer), few
            elif sum(len(flight.rows) for flight in self.flights) > many:
                flight, rows = min(self.flights, key=layer), 0
            else:
                return
            self.advance(
                flight,
                rows,
                min(
                    (layer(other) for other in self.flights if layer(other) > layer(flight)),
                    default=None,
                ),
            )
            if flight.rows:
                flight.state = self.backbone.rest(flight.state)
                for other in self.flights:
                    if (
                        other is not flight
                        and layer(other) == layer(flight)
                        and len(other.rows) + len(flight.rows) <= self.room
                    ):
                        self.join(flight, other)
            self.flights = [flight for flight in self.flights if flight.rows]

    def advance(self, flight, rows=0, layer=None):
        """On through the layers until at most so many rows are left, or after `layer`."""
        backbone, l = self.backbone, self.backbone.n_layers
        while len(flight.rows) > rows and flight.state.layer < (layer or l):
            k = flight.state.layer + 1
            flight.state = backbone.step(flight.state, k)
            if k <= self.last and (
                self.decide or flight.scorer.needs_all or self.bars[k - 1] < math.inf
            ):
                self.leave(flight, k)
        if flight.rows and flight.state.layer == l:
            self.left += [
                (row, logits, l, 1.0)
                for row, logits in zip(flight.rows, backbone.finish(flight.state).float().tolist())
            ]
            flight.rows = []

    def leave(self, flight, k):
        """The rows that exit at layer k leave the flight."""
        x = self.backbone.read(flight.state, self.reads)
        if x.is_cpu and x.dtype is torch.float32 and not self.autocast:
            early, scores = flight.scorer(k, x)
        else:  # F may run elsewhere and in lower precision, heads and scores do not
            with torch.autocast("cpu", enabled=False):
                early, scores = flight.scorer(k, x.float().cpu())
        bar = self.bars[k - 1]
        leaves = (
            self.decide(k, scores, flight.rows)
            if self.decide
            else [score > bar for score in scores]
        )
        if any(leaves):
            self.left += [
                (row, logits, k, score)
                for row, logits, score, left in zip(flight.rows, early, scores, leaves)
                if left
            ]
            stays = remaining(leaves)
            flight.rows = [flight.rows[i] for i in stays]
            if stays:
                flight.scorer.keep(stays)
                flight.state = self.backbone.keep(flight.state, stays)

    def join(self, flight, other):
        """Take in the rows of another flight that has come as far."""
        flight.scorer.join(other.scorer)
        flight.state, flight.rows, other.rows = (
            self.backbone.join(flight.state, other.state),
            flight.rows + other.rows,
            [],
        )

    def results(self):
        """Logits (n, C), exit layers and confidences, by row number."""
        _, logits, exits, confidences = (
            zip(*sorted(self.left, key=lambda one: one[0])) if self.left else [()] * 4
        )
        return (
            np.array(logits, np.float32).reshape(len(exits), self.backbone.num_labels),
            np.array(exits, int),
            np.array(confidences, float),
        )


def remaining(leaves):
    """The numbers of the rows that stay, the last ones in the places of those that leave: so that
    most need not be moved.

    >>> remaining([False, True, False, False, True, False])
    [0, 5, 2, 3]
    """
    stays = [i for i, left in enumerate(leaves) if not left]
    last = iter(reversed(stays))
    return [next(last) if left else i for i, left in enumerate(leaves[: len(stays)])]


def starting(batch_size):
    """Rows that start together where F would take `batch_size`: the rest of F's memory is for rows
    that wait, and for the gaps that batches of all sizes leave.
    """
    return max(1, 3 * batch_size // 4)
