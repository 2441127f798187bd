"""Audited inputs of a call: they go on to F after their exit, so that their rows of a ScoreTable
are complete (see cats.Monitor).

An audited row is answered where it exits, like any other. A copy of its state then waits for
others that have come as far, and they go on together when all answers are there. A row that
reaches the last layer by itself is complete without further work.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from cats.runtime.loop import Cohort, Loop
from cats.stats.monitor import Monitor
from cats.stats.table import ScoreTable

if TYPE_CHECKING:
    from cats.runtime.cat import CAT


class Audit:
    """What every layer says about the audited rows of one call of `CAT.run`.

    rows   their numbers there, in the order of the inputs
    """

    def __init__(self, cat: "CAT", rows: list[int], measure: str) -> None:
        self.cat, self.measure, self.place = cat, measure, {row: i for i, row in enumerate(rows)}
        n, l = len(rows), cat.backbone.n_layers
        self.logits = np.full((n, l, cat.backbone.num_labels), np.nan, np.float32)
        self.scores = np.full((n, l - 1), np.nan)
        self.exits = np.zeros(n, int)
        # those that have left go on here, where nobody leaves
        self.loop = Loop(cat, np.full(l - 1, np.inf), decide=lambda k, *_: [], audit=self)

    def note(
        self, k: int, rows: list[int], logits: list[Any], scores: list[float] | None = None
    ) -> None:
        """What layer k said, row by row; the last layer has no scores."""
        for j, row in enumerate(rows):
            i = self.place.get(row)
            if i is not None:
                self.logits[i, k - 1] = logits[j]
                if scores is not None:
                    self.scores[i, k - 1] = scores[j]

    def left(self, k: int, cohort: Cohort, leaves: list[bool], room: int) -> None:
        """Rows have exited at layer k: the audited ones among them wait here, as a copy."""
        some = [j for j, row in enumerate(cohort.rows) if leaves[j] and row in self.place]
        for j in some:
            self.exits[self.place[cohort.rows[j]]] = k
        if some:
            backbone = self.cat.backbone
            copy = backbone.keep(backbone.compact(cohort.state), some)
            rows = [cohort.rows[j] for j in some]
            self.loop.wait(Cohort(backbone.compact(copy), rows, cohort.scorer.copy(some)), room)

    def finish(self, monitor: Monitor) -> bool:
        """Run what waits on to F, and tell the monitor. Returns its alarm."""
        self.cat.proceed(self.loop)
        self.exits[self.exits == 0] = self.cat.backbone.n_layers
        meta = self.scores if self.measure == "meta" else None
        table = ScoreTable(self.logits, meta, tau=self.cat.table.tau)
        return monitor.watch(table, self.exits, self.measure)
