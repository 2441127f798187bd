"""Thresholds for early exits, with finite-sample guarantees (Section 4 of the paper, and five
calibrators beyond it).

| method        | what it promises               | why                                            |
|---------------|--------------------------------|------------------------------------------------|
| `static`      | nothing                        | one layer for all inputs                       |
| `threshold`   | nothing                        | exit when the score exceeds 1-epsilon          |
| `naive`       | the bound it reports           | Proposition 3.1, Clopper-Pearson on one half   |
| `independent` | P(G = F) >= 1-epsilon          | Theorem 4.4, one quantile a layer, Bonferroni  |
| `shared`      | also given an inconsistent one | Theorem 4.6, quantile of the worst wrong score |
| `shared_all`  | P(G = F) >= 1-epsilon          | over all inputs, -inf where nothing is wrong   |
| `first_exit`  | P(G = F) >= 1-epsilon          | the first layer above a threshold is a record  |
| `pac`         | P(risk <= epsilon) >= 1-delta  | binomial tail on the statistic of `first_exit` |
| `ltt`         | P(risk <= epsilon) >= 1-delta  | fixed-sequence tests of the true risk          |
| `band`        | the same for all epsilon <= ½  | a band around V's law: epsilon may be chosen   |
|               | at once                        | after looking                                  |
| `crc`         | E[loss(G, F)] <= epsilon       | conformal risk control (`cats.stats.risk`)     |

A marginal promise, P(G = F) >= 1-epsilon, is over draws of the calibration set and of the new
input, and needs them exchangeable. The other promises are over draws of the calibration set and
need *independent* inputs, which rows that share a page or a user are not: `naive` (Clopper and
Pearson 1934), `pac` (probably approximately correct: Vovk 2012), `ltt` (learn then test:
Angelopoulos et al. 2021; Bates et al. 2021 for monotone risks) and `band`.

**What may be chosen when.** Every promise but `band`'s is for an epsilon, a measure and exit layers
fixed before the calibration inputs are seen. Whoever wants to look first (at the layers saved,
say) looks at other inputs, or uses `band`: one set of calibration inputs, any epsilon afterwards,
and `choices=K` for the best of K measures or sets of layers.

**Ties between table and runtime.** A threshold is some calibration input's score, and a runtime
computes scores in other arithmetic than the table. With `margin=m`, a bound on their difference,
the promise is for a runtime that exits where its score > threshold + m. `first_exit`, `pac`, `band`
and `crc` then look at near-records (`cats.stats.exits.records`). `shared`, `shared_all` and
`independent` look at every inconsistent layer anyway: an exit at k has a table score above the
threshold, so their thresholds stay as they are. `static` and `threshold` promise nothing, and
`ltt` and `naive`, which count the table's own exits, refuse a margin: use `pac`.

**A body that is only nearly F** (a faster arithmetic): `consistent` then has l columns, all against
F, the last for the body's own last layer. Inputs on which that is wrong have V = +inf. Where they
are too many for epsilon the threshold is `inf`, with a warning: then F itself has to run, for the
body's last layer does not keep the promise either.

Scores are "higher = more confident". Column k-1 belongs to layer k; an input exits at the first
layer whose score is strictly above that layer's threshold, else at the last layer l. All ranks are
integers computed in exact arithmetic. One more calibrator is a function and a line:

    @calibrator("cautious", form="one", guarantee="marginal")
    def cautious(cal, epsilons):
        levels = [1 - epsilon / 2 for epsilon in epsilons]
        return same_for_all_layers(cal, sorted_quantiles(cal.worst(), levels))
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from cats.stats.exits import (  # noqa: F401  (also known by this module's name)
    ExitEvents,
    agreement,
    check_scores,
    exit_layers,
    first_above,
    records,
    with_last,
    worst_score,
)
from cats.stats.quantiles import (  # noqa: F401
    Bools,
    CalibrationWarning,
    Floats,
    Ints,
    Number,
    band_level,
    calibration_size,
    clopper_pearson,
    conformal_quantile,
    conformal_rank,
    coverage_band,
    exact,
    most_errors,
    probability,
    smallest_epsilon,
    sorted_quantiles,
)


class CalibrationSet:
    """Scores and consistency with what the calibrators need sorted once; `part` restricts it
    without sorting again.

    scores      (n, l-1)
    consistent  (n, l-1), or (n, l) for a body that is only nearly F: its last layer may be wrong
    margin      by how much a runtime's scores may differ from these, for all layers or one each
    spread      (n, l-1), the scores as the margin counts them: in the same order, on another scale
    """

    def __init__(
        self,
        scores: ArrayLike,
        consistent: ArrayLike,
        margin: ArrayLike = 0.0,
        spread: ArrayLike | None = None,
    ) -> None:
        self.scores, given = check_scores(scores, consistent)
        self.spread = self.scores if spread is None else check_scores(spread)
        self.margin: Floats = np.asarray(margin, dtype=float)
        known = self.margin.shape in ((), self.scores.shape[1:])
        if not (known and np.isfinite(self.margin).all() and (self.margin >= 0).all()):
            raise ValueError(
                "margin must be a finite number of at least 0, or one for each of"
                f" {self.scores.shape[1]} layers, got {margin!r}"
            )
        self.agrees: Bools = with_last(given, self.scores.shape[1])  # (n, l)
        self.keep: Bools = np.ones(len(self.scores), bool)
        self.whole, self._cache = self, {}  # type: CalibrationSet, dict[Any, Any]

    def part(self, keep: Bools) -> "CalibrationSet":
        """The same set restricted to the inputs where the mask `keep` holds."""
        part = object.__new__(CalibrationSet)
        part.scores, part.agrees, part.margin = self.scores, self.agrees, self.margin
        part.keep, part.whole, part._cache, part.spread = keep, self.whole, {}, self.spread
        return part

    @property
    def n(self) -> int:
        return int(np.count_nonzero(self.keep))

    @property
    def early(self) -> int:
        """l-1, the number of early layers."""
        return self.scores.shape[1]

    @property
    def consistent(self) -> Bools:
        """Whether F_k(x) = F(x) at the early layers, (n, l-1)."""
        return self.agrees[:, :-1]

    @property
    def lost(self) -> int:
        """Inputs on which the last layer differs from F: no threshold makes them agree."""
        return int(np.count_nonzero(~self.agrees[self.keep, -1]))

    @cached_property
    def near(self) -> Bools:
        """The (near-)records of all inputs of the whole set, (n, l-1)."""
        return records(self.spread, self.margin) if self is self.whole else self.whole.near

    def _sorted(self, name: Any, make: Callable[[], tuple[Floats, Ints]]) -> tuple[Floats, Ints]:
        """Sorted values by name, with the rows they belong to; a part filters what the whole has
        sorted.
        """
        if name not in self._cache:
            if self is self.whole:
                values, rows = make()
                order = np.argsort(values, kind="stable")
                self._cache[name] = values[order], rows[order]
            else:
                values, rows = self.whole._sorted(name, make)
                inside = self.keep[rows]
                self._cache[name] = values[inside], rows[inside]
        return self._cache[name]

    def worst(self, only_records: bool = False) -> Floats:
        """Sorted V of all inputs."""

        def make() -> tuple[Floats, Ints]:
            values = worst_score(self.scores, self.agrees, only_records and self.near)
            return values, np.arange(len(self.scores))

        return self._sorted(("worst", only_records), make)[0]

    def worst_given_some(self) -> Floats:
        """Sorted V of the inputs with at least one inconsistent layer."""

        def make() -> tuple[Floats, Ints]:
            rows = np.flatnonzero(~self.agrees.all(axis=1))
            return worst_score(self.scores[rows], self.agrees[rows]), rows

        return self._sorted("worst given some", make)[0]

    @cached_property
    def inconsistent(self) -> tuple[Floats, Ints]:
        """Scores of the inconsistent layers, layer by layer and sorted within each, and how many
        each layer has.
        """
        if "inconsistent" not in self.whole._cache:
            column, row = np.nonzero(~self.consistent.T)
            order = np.lexsort((self.scores[row, column], column))
            found = column[order], row[order], self.scores[row, column][order]
            self.whole._cache["inconsistent"] = found
        column, row, values = self.whole._cache["inconsistent"]
        inside = self.keep[row]
        return values[inside], np.bincount(column[inside], minlength=self.early)

    @cached_property
    def events(self) -> ExitEvents:
        return self.whole.events if self is not self.whole else ExitEvents(self.scores)

    @cached_property
    def _errors(self) -> tuple[Ints, Ints]:
        if self is not self.whole:
            return self.whole._errors
        wrong = (~self.agrees).astype(np.int64)
        return wrong, self.events.steps(wrong)

    def errors(self, thresholds: Floats) -> Ints:
        """The number of inputs with G_t != F at every shared threshold t: the true risk, which need
        not be monotone.
        """
        return self.events.curve(*self._errors, self.keep)(thresholds)


# --- the registry


class Method(NamedTuple):
    """A calibrator: how its thresholds are found, what shape they have, and what it promises."""

    thresholds: Callable[..., Floats]  # (calibration set, epsilons, options) → (epsilons, l-1)
    form: str  # "one" threshold for all layers, "each" layer its own, or one fixed "layer"
    guarantee: str  # "none", "bound", "marginal" or "pac"
    margins: bool = False  # whether its promise survives scores that are off by the set's margin
    bodies: bool = False  # whether it knows a last layer that is not F


METHODS: dict[str, Method] = {}


def calibrator(
    name: str, *, form: str, guarantee: str, margins: bool = False, bodies: bool = False
) -> Callable[[Callable[..., Floats]], Callable[..., Floats]]:
    """Register a function (calibration set, epsilons, options) → thresholds (len(epsilons), l-1).

    form       "one": the same threshold for all layers; "each": one a layer; "layer": -inf from one
               layer on and inf before it
    guarantee  "none", "bound", "marginal" or "pac"
    margins    whether its promise survives scores that are off by the set's margin
    bodies     whether it looks at all l columns of `agrees`, so that the last layer need not be F

    The options are the function's further arguments; all need defaults.
    """
    if form not in ("one", "each", "layer"):
        raise ValueError(f"form must be one, each or layer, got {form!r}")

    def register(function: Callable[..., Floats]) -> Callable[..., Floats]:
        METHODS[name] = Method(function, form, guarantee, margins, bodies)
        return function

    return register


def find_method(name: str, options: Iterable[str] = ()) -> Method:
    """The calibrator of that name; says what there is when there is none, or when an option is not
    its own.
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; there are {', '.join(METHODS)}")
    if given := set(options):
        known = list(inspect.signature(METHODS[name].thresholds).parameters)[2:]
        if unknown := sorted(given - set(known)):
            raise TypeError(
                f"{name} takes {', '.join(known) or 'no options'}, not {', '.join(unknown)}"
            )
    return METHODS[name]


def same_for_all_layers(cal: CalibrationSet, thresholds: ArrayLike) -> Floats:
    """One threshold an epsilon, as thresholds (epsilons, l-1)."""
    return np.repeat(np.asarray(thresholds, dtype=float)[:, None], cal.early, axis=1)


# --- the calibrators


@calibrator("static", form="layer", guarantee="none", margins=True)
def _static(cal: CalibrationSet, epsilons: Sequence[Fraction]) -> Floats:
    agree = cal.n - cal.inconsistent[1]
    thresholds = np.full((len(epsilons), cal.early), np.inf)
    for row, epsilon in zip(thresholds, epsilons):
        enough = np.flatnonzero(agree >= math.ceil((1 - epsilon) * cal.n))
        if cal.n and len(enough):
            row[enough[0] :] = -np.inf
    return thresholds


@calibrator("threshold", form="one", guarantee="none", margins=True)
def _threshold(cal: CalibrationSet, epsilons: Sequence[Fraction]) -> Floats:
    return same_for_all_layers(cal, [float(1 - epsilon) for epsilon in epsilons])


def halves(keep: Bools, seed: int = 0) -> Bools:
    """A random half of the kept inputs, as a mask: the one that `naive` tunes on."""
    rows = np.random.default_rng(seed).permutation(np.flatnonzero(keep))
    half = np.zeros_like(keep)
    half[rows[: len(rows) // 2]] = True
    return half


def naive(
    cal: CalibrationSet, epsilons: Sequence[Fraction], delta: Number = 0.01, seed: int = 0
) -> tuple[Floats, Floats]:
    """Section 3.3: the smallest threshold that is consistent enough on one half, and Proposition
    3.1's bound on the other.

    Returns thresholds (len(epsilons), l-1) and the lower bounds (len(epsilons),) on the true
    consistency; each holds with probability 1-delta over draws of independent inputs.
    """
    half = halves(cal.keep, seed)
    tune, rest = cal.part(half), cal.part(cal.keep & ~half)
    if tune.n == 0:  # a single input: nothing to tune on
        return np.full((len(epsilons), cal.early), np.inf), np.zeros(len(epsilons))
    candidates = np.concatenate([[-np.inf], np.unique(tune.events.score[half[tune.events.row]])])
    errors = tune.errors(candidates)
    best = [candidates[np.argmax(errors <= math.floor(epsilon * tune.n))] for epsilon in epsilons]
    bounds = clopper_pearson(rest.n - rest.errors(np.array(best)), rest.n, delta)
    return same_for_all_layers(cal, best), np.atleast_1d(bounds)


@calibrator("naive", form="one", guarantee="bound", bodies=True)
def _naive(
    cal: CalibrationSet, epsilons: Sequence[Fraction], delta: Number = 0.01, seed: int = 0
) -> Floats:
    return naive(cal, epsilons, delta, seed)[0]


@calibrator("independent", form="each", guarantee="marginal", margins=True)
def _independent(
    cal: CalibrationSet, epsilons: Sequence[Fraction], weights: Sequence[Number] | None = None
) -> Floats:
    shares = [Fraction(1, cal.early)] * cal.early
    if weights is not None:
        shares = [exact(weight) for weight in weights]
    if len(shares) != cal.early:
        raise ValueError(f"{len(shares)} weights for {cal.early} early layers")
    total = sum(shares, Fraction())
    if min(shares) < 0 or abs(total - 1) > Fraction(1, 10**9):
        raise ValueError(f"weights must be at least 0 and sum to 1, they sum to {float(total)}")
    levels = {share: [1 - share * epsilon for epsilon in epsilons] for share in set(shares)}
    values, counts = cal.inconsistent
    layers = np.split(values, np.cumsum(counts)[:-1])
    return np.stack(
        [sorted_quantiles(layer, levels[share]) for layer, share in zip(layers, shares)], axis=1
    )


@calibrator("shared", form="one", guarantee="marginal", margins=True, bodies=True)
def _shared(cal: CalibrationSet, epsilons: Sequence[Fraction]) -> Floats:
    levels = [1 - epsilon for epsilon in epsilons]
    return same_for_all_layers(cal, sorted_quantiles(cal.worst_given_some(), levels))


@calibrator("shared_all", form="one", guarantee="marginal", margins=True, bodies=True)
def _shared_all(cal: CalibrationSet, epsilons: Sequence[Fraction]) -> Floats:
    levels = [1 - epsilon for epsilon in epsilons]
    return same_for_all_layers(cal, sorted_quantiles(cal.worst(), levels))


@calibrator("first_exit", form="one", guarantee="marginal", margins=True, bodies=True)
def _first_exit(cal: CalibrationSet, epsilons: Sequence[Fraction]) -> Floats:
    levels = [1 - epsilon for epsilon in epsilons]
    return same_for_all_layers(cal, sorted_quantiles(cal.worst(only_records=True), levels))


@calibrator("pac", form="one", guarantee="pac", margins=True, bodies=True)
def _pac(cal: CalibrationSet, epsilons: Sequence[Fraction], delta: Number = 0.01) -> Floats:
    delta = probability(delta, "delta")
    worst = cal.worst(only_records=True)
    allowed = [most_errors(cal.n, epsilon, delta) for epsilon in epsilons]
    return same_for_all_layers(cal, [worst[cal.n - 1 - m] if m >= 0 else np.inf for m in allowed])


# A sequence fixed before any data is seen: dense where scores are probabilities, coarse far
# outside, strict to loose.
FIXED_SEQUENCE = np.unique(
    np.concatenate(
        [1 / (1 + np.exp(-np.linspace(-16, 16, 1281))), np.sinh(np.linspace(-14, 14, 1401))]
    )
)[::-1]


@calibrator("ltt", form="one", guarantee="pac", bodies=True)
def _ltt(
    cal: CalibrationSet,
    epsilons: Sequence[Fraction],
    delta: Number = 0.01,
    sequence: ArrayLike | None = None,
) -> Floats:
    delta = probability(delta, "delta")
    tried = FIXED_SEQUENCE if sequence is None else np.asarray(sequence, dtype=float)
    if tried.ndim != 1 or not len(tried) or not (np.diff(tried) < 0).all():
        raise ValueError(
            "sequence must be one-dimensional and strictly decreasing, from strict to loose"
        )
    errors = cal.errors(tried)
    thresholds = []
    for epsilon in epsilons:
        # the binomial p-value is at most delta exactly when the errors are at most this many
        failed = np.append(errors > most_errors(cal.n, epsilon, delta), True)
        rejected = int(np.argmax(failed))  # how many nulls fall before the first that stands
        thresholds.append(tried[rejected - 1] if rejected else np.inf)
    return same_for_all_layers(cal, thresholds)


@calibrator("band", form="one", guarantee="pac", margins=True, bodies=True)
def _band(
    cal: CalibrationSet, epsilons: Sequence[Fraction], delta: Number = 0.01, choices: int = 1
) -> Floats:
    bounds = coverage_band(cal.n, _shared_out(delta, choices))
    values = np.append(cal.worst(only_records=True)[cal.n - len(bounds) :], np.inf)
    levels = [float(1 - epsilon) for epsilon in epsilons]
    return same_for_all_layers(cal, values[np.searchsorted(bounds, levels)])


def _shared_out(delta: Number, choices: int) -> Fraction:
    """delta for each of so many choices (Bonferroni)."""
    if isinstance(choices, bool) or not isinstance(choices, (int, np.integer)) or choices < 1:
        raise ValueError(f"choices must be a whole number of at least 1, got {choices!r}")
    return probability(delta, "delta") / int(choices)


def band_size(epsilon: Number, delta: Number = 0.01, choices: int = 1) -> int:
    """The smallest calibration set from which `band` can promise epsilon.

    >>> band_size(0.05)
    139
    """
    level, share = probability(epsilon, "epsilon"), _shared_out(delta, choices)
    n = calibration_size(level, share)  # `pac` needs as many, `band` more
    while True:  # b_n = η^(1/n), and η falls slowly with n
        need = math.ceil(math.log(band_level(n, share)) / math.log1p(-level))
        if need <= n:
            break
        n = need
    while n > 1 and coverage_band(n - 1, share)[-1] >= float(1 - level):
        n -= 1
    return n


# --- one call


def why_not(
    cal: CalibrationSet,
    epsilon: Fraction,
    method: str,
    thresholds: Floats,
    options: Mapping[str, Any],
) -> str | None:
    """Why a calibrator with a guarantee answered `inf`, and how many calibration points it would
    need; else None.
    """
    shut = np.flatnonzero(np.isposinf(thresholds))
    if METHODS[method].guarantee == "none" or not len(shut):
        return None
    what, have, need = "inputs", cal.n, calibration_size(epsilon)  # type: str, int, float
    if method == "independent":
        weights = options.get("weights")
        shares = [Fraction(1, cal.early) if weights is None else exact(weights[k]) for k in shut]
        need = max(calibration_size(share * epsilon) if share else math.inf for share in shares)
        have = cal.inconsistent[1][shut].min()
        layers = ", ".join(str(k + 1) for k in shut)
        what = f"inputs inconsistent at a layer (layers {layers} stay shut)"
    elif method == "shared":
        what, have = "inputs with an inconsistent layer", len(cal.worst_given_some())
    elif method == "band":
        need = band_size(epsilon, **options)
    elif METHODS[method].guarantee == "pac":
        need = calibration_size(epsilon, options.get("delta", 0.01))
    elif method == "naive":
        need = 2
    elif method == "crc" and epsilon < exact(options.get("bound", 1)):
        need = calibration_size(epsilon / exact(options.get("bound", 1)))
    if have >= need and cal.lost:
        return (
            f"{method} cannot promise epsilon={float(epsilon):g}: the last layer differs from F on"
            f" {cal.lost} of {cal.n} inputs, which no threshold mends; threshold inf: let F itself"
            " run, or a body closer to it"
        )
    if have >= need:  # ltt alone: the strictest threshold of its sequence already errs too often
        what += " and fewer errors among the most confident of them"
    return (
        f"{method} cannot promise epsilon={float(epsilon):g}: it needs at least {need} {what},"
        f" there are {have}; threshold inf"
    )


def calibrate(
    scores: ArrayLike,
    consistent: ArrayLike,
    epsilon: Number,
    method: str = "shared",
    *,
    correct: ArrayLike | None = None,
    margin: ArrayLike = 0.0,
    **options: Any,
) -> Floats:
    """Thresholds (l-1,) under which the early-exit model G agrees with F as often as the method
    promises.

    >>> scores = np.array([[.1, .9], [.8, .9], [.3, .2], [.6, .7]])
    >>> consistent = np.array([[False, True], [True, True], [False, False], [True, True]])
    >>> calibrate(scores, consistent, 0.4, method="first_exit")
    array([0.1, 0.1])

    scores      (n, l-1), higher = more confident; unlabelled calibration inputs, never trained on
    consistent  (n, l-1), whether F_k(x) = F(x); (n, l) for a body whose last layer is not quite F
    epsilon     the tolerated rate of G != F, in (0, 1)
    method      one of METHODS, by default the paper's. CAT and Cascade take first_exit unless told
                otherwise: it promises the same agreement, and no input leaves later
    correct     (n,), whether F is right: calibrate on those inputs alone. Then P(G = F | F = Y) >=
                1-epsilon, so that for classes P(G = Y) >= (1-epsilon)·P(F = Y); agreement on all
                inputs only gives P(G = Y) >= P(F = Y) - epsilon. For regression neither holds: two
                numbers within tau of a third may be 2·tau apart
    margin      a bound on |runtime score - score|, for all layers or (l-1,) one each; the runtime
                then exits where score > threshold + margin
    options     `weights` for independent; `delta` for naive, pac, ltt, band; `choices` for band;
                `seed` for naive; `sequence` for ltt; `losses` and `bound` for crc

    What `naive` promises is a bound, which `cats.stats.calibrators.naive` and the column `bound` of
    `evaluate` give. Where the data cannot promise epsilon the thresholds are `inf`, with a
    CalibrationWarning that says what is missing.
    """
    cal = CalibrationSet(scores, consistent, margin)
    if correct is not None:
        correct = np.asarray(correct)
        if correct.dtype != bool or correct.shape != (cal.n,):
            raise TypeError(
                f"correct must be a boolean array of shape ({cal.n},), got {correct.dtype}"
                f" {correct.shape}"
            )
        cal = cal.part(correct)
    return thresholds_from(cal, epsilon, method, stacklevel=3, **options)


def thresholds_from(
    cal: CalibrationSet, epsilon: Number, method: str, stacklevel: int = 2, **options: Any
) -> Floats:
    """`calibrate` from a CalibrationSet: asked for another epsilon, it sorts nothing again."""
    found = find_method(method, options)
    level = probability(epsilon, "epsilon")
    if cal.margin.any() and not found.margins:
        raise ValueError(
            f"{method} cannot take a margin of {cal.margin.max():g} into account: use first_exit,"
            " pac or band"
        )
    if not found.bodies and found.guarantee != "none" and not cal.whole.agrees[:, -1].all():
        raise ValueError(
            f"{method} takes the last layer for F, and here it is not on {cal.lost} of {cal.n}"
            " inputs: use first_exit, pac or band"
        )
    thresholds = found.thresholds(cal, [level], **options)[0]
    reason = why_not(cal, level, method, thresholds, options)
    if reason:
        warnings.warn(reason, CalibrationWarning, stacklevel=stacklevel)
    return thresholds
