"""Does the promise still hold? A test that may be looked at after every input, for ever.

Some inputs are audited: by a coin thrown before they run, they go on to F after their exit, so that
G != F is known of them without any label. Let e_i be 1 where it is, and suppose the promise holds:
given the past, e_i is 1 with probability at most epsilon. Then for any bet λ in [0, 1/epsilon)

E_t = Π (1 + λ·(e_i - epsilon))

is a fair game or worse, and by Ville's inequality it ever reaches 1/delta with probability at most
delta. E here is the mean of such games for several λ, each the best bet against one larger risk.
It depends on the counts alone, so several workers' monitors merge by adding up.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cats.stats.exits import agreement, check_scores
from cats.stats.quantiles import Bools, Floats, Ints, Number, exact, probability

FORMAT = "cats.Monitor/1"


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
    """

    def __init__(
        self,
        epsilon: Number,
        delta: Number = 0.01,
        audit: Number = 0.05,
        step: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.epsilon = float(probability(epsilon, "epsilon"))
        self.delta = float(probability(delta, "delta"))
        self.audit = float(exact(audit))
        if not 0 < self.audit <= 1:
            raise ValueError(f"audit must lie in (0, 1], got {audit!r}")
        if not 0 <= step < math.inf:
            raise ValueError(f"step must be a finite number of at least 0, got {step!r}")
        self.step, self.seed, self.thrown = float(step), int(seed), 0
        self.audited = self.errors = 0
        self.peak = 1.0  # the largest E so far
        self.running = self.epsilon  # the epsilon of adaptive mode, unclipped
        self.rows: list[tuple[Floats, Bools]] = []

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
        return self.alarm

    def observe(self, scores: ArrayLike, consistent: ArrayLike, exits: ArrayLike) -> bool:
        """Take in audited inputs with all their layers, which also calibrate: see `calibration`."""
        scores, consistent = check_scores(scores, consistent)
        self.rows.append((scores, consistent))
        return self.update(~agreement(consistent, exits))

    def calibration(self) -> tuple[Floats, Bools]:
        """Scores and consistency of all inputs observed: fresh data for `cats.calibrate`.

        A threshold taken from them is for inputs that come later; the audits so far have judged the
        old one, so start a new monitor with it.
        """
        if not self.rows:
            raise ValueError("no audited rows: `observe` keeps them, `update` does not")
        scores, consistent = zip(*self.rows)
        return np.concatenate(scores), np.concatenate(consistent)

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
        found = Monitor(self.epsilon, self.delta, self.audit, self.step, self.seed)
        found.thrown = max(one.thrown for one in every)
        found.audited = sum(one.audited for one in every)
        found.errors = sum(one.errors for one in every)
        found.running += sum(one.running - one.epsilon for one in every)
        found.rows = [row for one in every for row in one.rows]
        found.peak = max(1.0, found.evidence)
        return found

    def to_json(self) -> str:
        """Settings and counts as text; the rows observed are not kept in it."""
        names = ("epsilon", "delta", "audit", "step", "seed", "thrown", "audited", "errors")
        state: dict[str, Any] = {name: getattr(self, name) for name in (*names, "peak", "running")}
        return json.dumps({"format": FORMAT, **state}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Monitor":
        """The monitor `to_json` wrote."""
        state: Mapping[str, Any] = json.loads(text)
        if state.get("format") != FORMAT:
            raise ValueError(f"not a monitor: its format is {state.get('format')!r}")
        found = cls(*(state[name] for name in ("epsilon", "delta", "audit", "step", "seed")))
        for name in ("thrown", "audited", "errors", "peak", "running"):
            setattr(found, name, state[name])
        return found


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
