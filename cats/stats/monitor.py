"""Does the promise still hold? A test that may be looked at after every input, for ever.

Some inputs are audited: by a coin thrown before they run, they go on to F after their exit, so that
G != F is known of them without any label. Let e_i be 1 where it is, and suppose the promise holds:
given the past, e_i is 1 with probability at most epsilon. Then for any bet λ in [0, 1/epsilon)

E_t = Π (1 + λ·(e_i - epsilon))

is a fair game or worse, and by Ville's inequality it ever reaches 1/delta with probability at most
delta. E here is the mean of such games for several λ, each the best bet against one larger risk.
It depends on the counts alone, so several workers' monitors merge by adding up.

What is watched is the risk of the one threshold in use. A marginal promise (`first_exit`, `shared`)
bounds its mean over calibration sets, and one in two such thresholds has a risk slightly above
epsilon, which a long stream will show. A promise that a monitor can hold a threshold to is that of
`pac`, `ltt` or `band`; or let the monitor's epsilon be a little larger than the one to run with.
"""

import json
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cats._io import warn, writing
from cats.stats.exits import agreement, check_scores
from cats.stats.quantiles import (
    Bools,
    Floats,
    Ints,
    Number,
    calibration_size,
    exact,
    probability,
)
from cats.stats.table import TAU, ScoreTable

FORMAT = "cats.Monitor/1"
NAMES = ("epsilon", "delta", "audit", "step", "seed", "keep")  # settings, in this order
COUNTS = ("thrown", "audited", "errors", "layers", "peak", "running", "measure", "tau")


class PromiseWarning(UserWarning):
    """A monitor's alarm: G and F disagree more often than was promised."""


class Monitor:
    """Watches the rate of G != F on audited inputs.

    >>> monitor = Monitor(epsilon=0.05, audit=0.2, seed=4)
    >>> monitor.coin(5).tolist()  # which of the next inputs to audit, before they run
    [True, False, False, True, False]
    >>> monitor.update([True] * 6)
    True
    >>> monitor.errors, monitor.audited, monitor.alarm
    (6, 6, True)

    epsilon  the promised rate of G != F
    delta    P(an alarm is ever raised although the promise holds) is at most this
    audit    the probability of an audit
    step     adaptive mode: the epsilon to run with moves by step·(epsilon - e_i) after each audit
             (Gibbs and Candès 2021), so that the rate of errors approaches epsilon even as inputs
             drift; 0 leaves it alone
    seed     of the coin
    keep     audited rows that are kept to calibrate on again: the last ones
    path     a file in which the state is kept after every update; a monitor whose file is there
             goes on from it. Audited rows lie beside it, as a ScoreTable
    """

    def __init__(
        self,
        epsilon: Number,
        delta: Number = 0.01,
        audit: Number = 0.05,
        step: float = 0.0,
        seed: int = 0,
        keep: int = 2000,
        path: str | Path | None = None,
    ) -> None:
        self.epsilon = float(probability(epsilon, "epsilon"))
        self.delta = float(probability(delta, "delta"))
        self.audit = float(exact(audit))
        if not 0 < self.audit <= 1:
            raise ValueError(f"audit must lie in (0, 1], got {audit!r}")
        if not 0 <= step < math.inf:
            raise ValueError(f"step must be a finite number of at least 0, got {step!r}")
        self.step, self.seed, self.thrown = float(step), int(seed), 0
        self.keep, self.path = int(keep), None if path is None else Path(path)
        self.audited = self.errors = self.layers = 0
        self.measure: str | None = None  # of the tables watched, as is tau
        self.tau = TAU
        self.peak = 1.0  # the largest E so far
        self.running = self.epsilon  # the epsilon of adaptive mode, unclipped
        # scores, consistency and logits of the last audited inputs, one by one
        self.rows: deque[tuple[Floats, Bools, Floats | None]] = deque(maxlen=self.keep)
        if self.path and self.path.exists():
            self._go_on(self.path)

    # --- auditing

    def coin(self, n: int) -> Bools:
        """Which of the next n inputs to audit, (n,); thrown before they run, so that it cannot
        depend on them.
        """
        rng = np.random.Generator(np.random.Philox(key=self.seed).advance(self.thrown))
        # one block of four numbers an input: a coin does not depend on how many are asked for
        found = rng.random(4 * n)[::4] < self.audit
        self.thrown += n
        return found

    def update(self, errors: ArrayLike) -> bool:
        """Take in audited inputs, in order: whether G != F, (n,). Returns `alarm`."""
        wrong = np.atleast_1d(np.asarray(errors))
        if wrong.dtype != bool or wrong.ndim != 1:
            raise TypeError(f"errors must be a boolean array (n,), got {wrong.dtype} {wrong.shape}")
        if not len(wrong):
            return self.alarm
        after = self.audited + np.arange(1, len(wrong) + 1)
        wealth = self._wealth(self.errors + np.cumsum(wrong), after)
        self.peak = max(self.peak, float(wealth.max()))
        self.audited, self.errors = int(after[-1]), self.errors + int(wrong.sum())
        self.running += self.step * (self.epsilon * len(wrong) - int(wrong.sum()))
        if self.path:
            self.save(self.path)
        return self.alarm

    def observe(self, scores: ArrayLike, consistent: ArrayLike, exits: ArrayLike) -> bool:
        """Take in audited inputs with all their layers, which also calibrate: see `calibration`."""
        scores, consistent = check_scores(scores, consistent)
        wrong = ~agreement(consistent, exits)
        self.rows.extend((*row, None) for row in zip(scores, consistent))
        return self.update(wrong)

    def watch(self, table: ScoreTable, exits: ArrayLike, measure: str = "meta") -> bool:
        """Take in the ScoreTable of audited inputs that left at these layers by this measure; it is
        kept, see `table`. Warns when an alarm is raised. Returns `alarm`.
        """
        if self.measure not in (None, measure):
            raise ValueError(
                f"this monitor has watched exits by {self.measure}, not by {measure}: one monitor"
                " a promise"
            )
        scores, consistent = check_scores(table.scores(measure), table.consistent)
        wrong = ~agreement(consistent, exits)
        self.measure, self.tau = measure, table.tau
        self.layers += int((table.n_layers - np.asarray(exits)).sum())
        self.rows.extend(zip(scores, consistent, table.logits))
        before = self.alarm
        if self.update(wrong) and not before:
            warn(self.report(), PromiseWarning)
        return self.alarm

    def calibration(self, last: int | None = None) -> tuple[Floats, Bools]:
        """Scores and consistency of the (last) inputs observed: fresh data for `cats.calibrate`.

        A threshold taken from them is for inputs that come later; the audits so far have judged the
        old one, so start a new monitor with it.
        """
        scores, consistent, _ = zip(*self._last(last))
        return np.array(scores), np.array(consistent)

    def table(self, last: int | None = None) -> ScoreTable:
        """The ScoreTable of the (last) inputs watched."""
        scores, _, logits = zip(*self._last(last))
        if any(one is None for one in logits):
            raise ValueError("these rows have no logits: `watch` keeps them, `observe` does not")
        meta = np.array(scores, np.float32) if self.measure == "meta" else None
        return ScoreTable(np.array(logits), meta, None, {"split": "audited"}, self.tau)

    def _last(self, n: int | None) -> list[tuple[Floats, Bools, Floats | None]]:
        if not self.rows:
            raise ValueError("no audited rows: `watch` and `observe` keep them, `update` does not")
        if n is not None and not 1 <= n <= len(self.rows):
            raise ValueError(f"{len(self.rows)} audited rows are kept, not {n}")
        return list(self.rows)[-(n or len(self.rows)) :]

    # --- the test

    @property
    def bets(self) -> Floats:
        """λ, each the best bet if the risk were so many times epsilon (or lay so far up to 1)."""
        times = self.epsilon * np.array([1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0])
        risks = np.unique(np.minimum(times, (1 + self.epsilon) / 2))
        return (risks - self.epsilon) / (self.epsilon * (1 - self.epsilon))

    def _wealth(self, errors: ArrayLike, audited: ArrayLike) -> Floats:
        """E for these counts: the mean of the games of all bets."""
        wrong, right = np.asarray(errors), np.asarray(audited) - np.asarray(errors)
        won = np.log1p(self.bets * (1 - self.epsilon))
        lost = np.log1p(-self.bets * self.epsilon)
        games = wrong[..., None] * won + right[..., None] * lost
        return np.exp(np.minimum(games, 700.0)).mean(axis=-1)

    @property
    def evidence(self) -> float:
        """E as it stands: large where the promise is broken."""
        return float(self._wealth(self.errors, self.audited))

    @property
    def alarm(self) -> bool:
        """Whether E has ever reached 1/delta."""
        return self.peak >= 1 / self.delta

    @property
    def level(self) -> float:
        """The epsilon to run with: the promised one, or in adaptive mode the one that has drifted;
        0 means all layers.
        """
        return min(max(self.running, 0.0), 1.0)

    def report(self) -> str:
        """How it stands in a sentence or two, and after an alarm what to do."""
        rate = f" ({self.errors / self.audited:.1%})" if self.audited else ""
        seen = (
            f"G ≠ F on {self.errors} of {self.audited} audited inputs{rate}; promised are at most"
            f" {self.epsilon:.3g}. Evidence against the promise: at most {self.peak:.3g} so far, an"
            f" alarm from {1 / self.delta:.3g} on"
        )
        if not self.alarm:
            return f"{seen}: no alarm."
        return (
            f"{seen}: ALARM, a false one with probability at most {self.delta:.3g}. Inputs are"
            " harder than those that calibrated. What to do: run F itself meanwhile"
            " (thresholds=[inf, …]), watched by a new Monitor(…, audit=1), which costs nothing"
            " where all layers run. When it has audited enough (to promise"
            f" {self.epsilon:.3g} takes at least {calibration_size(self.epsilon)}, some hundred are"
            " better) go on with cat.recalibrated(that monitor) and a monitor anew. The"
            f" {len(self.rows)} rows kept here calibrate at once, but some may be from before the"
            " shift."
        )

    def __repr__(self) -> str:
        return f"Monitor: {self.report()}"

    # --- several workers, and files

    def merge(self, *others: "Monitor") -> "Monitor":
        """One monitor with the counts of several workers that watch the same promise.

        The counts are those of one game in which the workers took turns, looked at whenever they
        merge: the chance that it ever raises a false alarm is delta. The workers' own peaks are
        those of other games, each with a delta of its own, and do not count here.
        """
        for other in others:
            if (other.epsilon, other.delta) != (self.epsilon, self.delta):
                raise ValueError("monitors with other epsilon or delta do not merge")
        every = (self, *others)
        measures = {one.measure for one in every if one.measure}
        if len(measures) > 1:
            raise ValueError(f"monitors of exits by {' and '.join(sorted(measures))} do not merge")
        found = Monitor(*(getattr(self, name) for name in NAMES))
        found.measure, found.tau = next(iter(measures), None), self.tau
        found.thrown = max(one.thrown for one in every)
        found.audited = sum(one.audited for one in every)
        found.errors = sum(one.errors for one in every)
        found.layers = sum(one.layers for one in every)
        found.running += sum(one.running - one.epsilon for one in every)
        found.keep = sum(one.keep for one in every)
        found.rows = deque((row for one in every for row in one.rows), maxlen=found.keep)
        found.peak = max(1.0, found.evidence)
        return found

    def to_json(self) -> str:
        """Settings and counts as text; the rows observed are not kept in it."""
        state: dict[str, Any] = {name: getattr(self, name) for name in (*NAMES, *COUNTS)}
        return json.dumps({"format": FORMAT, **state}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Monitor":
        """The monitor `to_json` wrote."""
        state: Mapping[str, Any] = json.loads(text)
        if state.get("format") != FORMAT:
            raise ValueError(f"not a monitor: its format is {state.get('format')!r}")
        found = cls(*(state[name] for name in NAMES))
        for name in COUNTS:
            setattr(found, name, state[name])
        return found

    def save(self, path: str | Path) -> Path:
        """Write the state, and beside it the rows watched, each file whole or not at all."""
        path = Path(path)
        if self.rows and all(logits is not None for *_, logits in self.rows):
            self.table().save(path.with_suffix(".safetensors"))
        with writing(path) as aside:
            aside.write_text(self.to_json(), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Monitor":
        """The monitor that `save` wrote; it does not write there itself."""
        path = Path(path)
        try:
            found = cls.from_json(path.read_text(encoding="utf-8"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} holds no whole monitor ({error})") from error
        beside = path.with_suffix(".safetensors")
        if found.measure is not None and beside.exists():
            table = ScoreTable.load(beside)
            found.rows.extend(zip(table.scores(found.measure), table.consistent, table.logits))
        return found

    def _go_on(self, path: Path) -> None:
        """Take up the state of a file, if it is of this very promise."""
        before = self.load(path)
        for name in NAMES:
            if getattr(before, name) != getattr(self, name):
                raise ValueError(
                    f"{path} is of a monitor whose {name} is {getattr(before, name)}, not"
                    f" {getattr(self, name)}: give another path, or take what is there with"
                    " Monitor.load"
                )
        for name in (*COUNTS, "rows"):
            setattr(self, name, getattr(before, name))


def false_alarms(
    epsilon: float, delta: float, inputs: int, trials: int, seed: int = 0, risk: float | None = None
) -> Ints:
    """When each of many monitors first raised an alarm, counted from 1; 0 for never: (trials,)."""
    rng = np.random.default_rng(seed)
    wrong = rng.random((trials, inputs)) < (epsilon if risk is None else risk)
    monitor = Monitor(epsilon, delta)
    wealth = monitor._wealth(wrong.cumsum(axis=1), np.arange(1, inputs + 1)[None])
    over = wealth >= 1 / delta
    return np.where(over.any(axis=1), over.argmax(axis=1) + 1, 0)
