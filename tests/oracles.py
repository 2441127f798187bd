"""Slow and obvious: the paper's pseudo-code, input by input and layer by layer, in exact
arithmetic.
"""

from fractions import Fraction
from functools import lru_cache
from math import comb, inf

import numpy as np
from scipy import optimize, stats


def level(epsilon):
    return 1 - Fraction(str(epsilon))


def quantile(values, level):
    """The smallest v such that at least a share `level` of values ∪ {∞} is at most v."""
    inflated = sorted(values) + [inf]
    for count, v in enumerate(inflated, start=1):
        if Fraction(count, len(inflated)) >= level:
            return v


def predict(scores, thresholds):
    """Algorithm 1, PREDICT: the exit layer of one input."""
    for k in range(len(scores)):
        if scores[k] > thresholds[k]:
            return k + 1
    return len(scores) + 1


def agrees(consistent, layer):
    """Whether G = F for one input that exits at `layer`."""
    return layer > len(consistent) or bool(consistent[layer - 1])


def errors(scores, consistent, thresholds):
    return sum(
        not agrees(consistent[i], predict(scores[i], thresholds)) for i in range(len(scores))
    )


def static(scores, consistent, epsilon):
    n, early = scores.shape
    for k in range(early):
        if n and Fraction(sum(bool(consistent[i, k]) for i in range(n)), n) >= level(epsilon):
            return [inf] * k + [-inf] * (early - k)
    return [inf] * early


def threshold(scores, consistent, epsilon):
    return [float(level(epsilon))] * scores.shape[1]


def naive(scores, consistent, epsilon, seed=0):
    n, early = scores.shape
    tune = np.random.default_rng(seed).permutation(n)[: n // 2]
    if not len(tune):
        return [inf] * early
    for t in [-inf] + sorted({float(s) for i in tune for s in scores[i]}):
        wrong = errors(scores[tune], consistent[tune], [t] * early)
        if 1 - Fraction(wrong, len(tune)) >= level(epsilon):
            return [t] * early


def independent(scores, consistent, epsilon, weights=None):
    n, early = scores.shape
    taus = []
    for k in range(early):
        weight = Fraction(1, early) if weights is None else Fraction(str(weights[k]))
        values = [scores[i, k] for i in range(n) if not consistent[i, k]]
        taus.append(quantile(values, 1 - weight * Fraction(str(epsilon))))
    return taus


def shared(scores, consistent, epsilon):
    """Algorithm 1, CALIBRATE."""
    n, early = scores.shape
    M = []
    for i in range(n):
        S = []
        for k in range(early):
            if not consistent[i, k]:
                S.append(scores[i, k])
        if S:
            M.append(max(S))
    return [quantile(M, level(epsilon))] * early


def shared_all(scores, consistent, epsilon):
    n, early = scores.shape
    M = []
    for i in range(n):
        S = [-inf]
        for k in range(early):
            if not consistent[i, k]:
                S.append(scores[i, k])
        M.append(max(S))
    return [quantile(M, level(epsilon))] * early


def first_exit_values(scores, consistent):
    values = []
    for i in range(len(scores)):
        best, S = -inf, [-inf]
        for k in range(scores.shape[1]):
            if scores[i, k] > best:  # a record
                best = scores[i, k]
                if not consistent[i, k]:
                    S.append(scores[i, k])
        values.append(max(S))
    return values


def first_exit(scores, consistent, epsilon):
    return [quantile(first_exit_values(scores, consistent), level(epsilon))] * scores.shape[1]


def binomial_cdf(m, n, p):
    return sum(comb(n, j) * p**j * (1 - p) ** (n - j) for j in range(m + 1))


def pac(scores, consistent, epsilon, delta=0.01):
    n, early = scores.shape
    falling = sorted(first_exit_values(scores, consistent), reverse=True)
    t = inf
    for m in range(n):
        if binomial_cdf(m, n, Fraction(str(epsilon))) > Fraction(str(delta)):
            break
        t = falling[m]
    return [t] * early


def ltt(scores, consistent, epsilon, delta=0.01, sequence=()):
    n, early = scores.shape
    certified = inf
    for t in sequence:
        wrong = errors(scores, consistent, [t] * early)
        if binomial_cdf(wrong, n, Fraction(str(epsilon))) > Fraction(str(delta)):
            break
        certified = t
    return [certified] * early


def oracle_layers(consistent, epsilon):
    """The fewest layers in all, by trying every way to choose which inputs may be wrong (tiny n
    only).
    """
    from itertools import combinations

    n, early = consistent.shape
    first = [next((k + 1 for k in range(early) if consistent[i, k]), early + 1) for i in range(n)]
    allowed = int(Fraction(str(epsilon)) * n)
    return min(
        sum(1 if i in wrong else first[i] for i in range(n))
        for wrong in combinations(range(n), allowed)
    )


def band_level(n, delta):
    """The local level of the band for n values, from the law of the counts of uniforms below each
    bound, bound by bound.
    """
    ranks = [k for k in range(1, n + 1) if 2 * k >= n + 1]

    def crossed(log_eta):
        bounds = stats.beta.ppf(np.exp(log_eta), ranks, [n + 1 - k for k in ranks])
        return 1 - stays_above(n, bounds) - delta

    return np.exp(optimize.brentq(crossed, np.log(delta) - 9, np.log(delta) + 1e-3, xtol=1e-12))


def stays_above(n, bounds):
    """P(the len(bounds) largest of n uniforms lie above their rising bounds)."""
    counts = np.arange(n + 1)
    chance, at = (counts == 0) * 1.0, 0.0  # how many uniforms lie below the bound
    for k, bound in zip(range(n - len(bounds) + 1, n + 1), bounds):
        p = (bound - at) / (1 - at)
        more = counts[None, :] - counts[:, None]
        chance = chance @ stats.binom.pmf(more, n - counts[:, None], p)
        chance[counts >= k] = 0  # the k-th smallest lies below
        at = bound
    return chance.sum()


@lru_cache
def band_bounds(n, delta):
    ranks = [k for k in range(1, n + 1) if 2 * k >= n + 1]
    eta = band_level(n, delta)
    return [(k, stats.beta.ppf(eta, k, n + 1 - k)) for k in ranks]


def band(scores, consistent, epsilon, delta=0.01):
    n, early = scores.shape
    rising = sorted(first_exit_values(scores, consistent))
    for k, bound in band_bounds(n, delta):
        if bound >= level(epsilon):
            return [rising[k - 1]] * early
    return [inf] * early


def crc(scores, consistent, epsilon, losses=None, bound=1, margin=0):
    """The smallest threshold, among all that could matter, whose inflated mean loss is small."""
    n, early = scores.shape
    losses = (~consistent).astype(float) if losses is None else losses
    bound, room = Fraction(str(bound)), np.broadcast_to(margin, early)
    for t in [-inf] + sorted({float(s) for s in scores.ravel()}):
        total = bound
        for i in range(n):
            worst = Fraction(0)
            for k in range(early):
                near = all(
                    scores[i, k] > scores[i, j]
                    or (room[j] and scores[i, k] >= scores[i, j] - 2 * room[j])
                    for j in range(k)
                )
                if near and scores[i, k] > t:
                    worst = max(worst, min(Fraction(str(float(losses[i, k]))), bound))
            if losses.shape[1] > early:
                worst = max(worst, min(Fraction(str(float(losses[i, early]))), bound))
            total += worst
        if total / (n + 1) <= Fraction(str(epsilon)):
            return [t] * early
    return [inf] * early
