"""The theorems against exact laws; what is broken on purpose must be caught.

Every check states its false-alarm probability (at most ALARM each, seeded) and is run on a broken
twin that has to fail.
"""

import mutations
import numpy as np
import pytest
from scipy import stats

import cats
from cats import Synthetic
from cats.stats import validity
from cats.stats.exits import worst_score
from cats.stats.quantiles import conformal_rank
from cats.stats.trials import split

ALARM = 1e-6
QUICK = {"trials": 1500, "alarm": ALARM}

CLAIMS = {
    "Lemma A.1, n=20": lambda: validity.lemma_a1(0.9, n=20, trials=8000, alarm=ALARM),
    "Lemma A.1, n=1": lambda: validity.lemma_a1(0.5, n=1, trials=8000, alarm=ALARM),
    "Lemma A.1, too few": lambda: validity.lemma_a1(0.9, n=8, trials=8000, alarm=ALARM),
    "Proposition 3.1": lambda: validity.proposition_31(n=200, **QUICK),
    "Proposition 3.1, tuned": lambda: validity.tuned_bound(trials=400, alarm=ALARM),
    "Proposition 4.1": lambda: validity.proposition_41(inputs=40_000),
    "first_exit, inclusion": lambda: validity.first_exit_inclusion(inputs=40_000),
    "Theorem 4.4, law": lambda: validity.independent_coverage(trials=500, alarm=ALARM),
    "Theorem 4.4": lambda: validity.marginal(
        "independent", n=600, epsilon=0.3, trials=500, alarm=ALARM
    ),
    "Theorem 4.6, law": lambda: validity.coverage("shared", **QUICK),
    "Theorem 4.6": lambda: validity.marginal("shared", **QUICK),
    "shared_all, law": lambda: validity.coverage("shared_all", **QUICK),
    "shared_all": lambda: validity.marginal("shared_all", **QUICK),
    "first_exit, law": lambda: validity.coverage("first_exit", **QUICK),
    "first_exit": lambda: validity.marginal("first_exit", **QUICK),
    "pac, law": lambda: validity.pac_law(**QUICK),
    "pac": lambda: validity.high_probability("pac", **QUICK),
    "ltt": lambda: validity.high_probability("ltt", **QUICK),
    "ltt, law": lambda: validity.ltt_law(trials=1000, alarm=ALARM),
    "naive": lambda: validity.naive_bound(trials=500, alarm=ALARM),
    "band, law": lambda: validity.band_law(trials=1000, alarm=ALARM),
    "crc": lambda: validity.expected_loss(**QUICK),
    "groups, law": lambda: validity.group_coverage(trials=300, alarm=ALARM),
    "nearly F, law": lambda: validity.nearly_f(trials=800, alarm=ALARM),
    "margin at a tie": lambda: validity.repeated_text(**QUICK),
    "Remark 4.3": lambda: validity.remark_43(),
    "Remark 4.5": lambda: validity.tuned_weights(trials=1000, alarm=ALARM),
    "Theorem 4.4, tight": lambda: validity.tight_union(trials=1000, alarm=ALARM),
    "Theorem 4.4, weights": lambda: validity.tight_union([0.1, 0.2, 0.3, 0.4], **QUICK),
    "labelled": lambda: validity.relative_accuracy(**QUICK),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_claim_holds(claim):
    check = CLAIMS[claim]()
    assert check.ok and check.false_alarm <= ALARM, check


def test_controls_fail():
    for check in validity.controls(alarm=ALARM):
        assert not check.ok and check.false_alarm <= ALARM, check


# --- planted bugs: each is put where the right thing was, and a check or property of this suite
# must notice ---------


def calibrate_with(quantile):
    """shared_all, with another quantile in it."""

    def calibrate(scores, consistent, epsilon, method):
        return np.full(scores.shape[1], quantile(worst_score(scores, consistent), 1 - epsilon))

    return calibrate


def test_right_quantile_passes_the_harness():
    """The harness itself is sound: with nothing broken in it the law holds."""
    check = validity.coverage(
        "shared_all", n=20, calibrate=calibrate_with(cats.conformal_quantile), **QUICK
    )
    assert check.ok, check


@pytest.mark.parametrize("bug", [validity.quantile_without_infinity, validity.quantile_off_by_one])
def test_bug_in_the_quantile_is_caught(bug):
    n = 8 if bug is validity.quantile_without_infinity else 20
    assert not validity.lemma_a1(n=n, quantile=bug, trials=8000, alarm=ALARM).ok
    assert not validity.coverage("shared_all", n=20, calibrate=calibrate_with(bug), **QUICK).ok


def test_bug_greater_or_equal_is_caught():
    def exits(scores, thresholds):
        above = np.column_stack([scores >= thresholds, np.ones(len(scores), bool)])
        return above.argmax(axis=1) + 1

    assert not validity.proposition_41(inputs=40_000, exits=exits).ok
    assert not validity.first_exit_inclusion(inputs=40_000, exits=exits).ok


def test_bug_maximum_over_consistent_layers_is_caught():
    def statistic(scores, consistent):
        return worst_score(scores, ~consistent)

    def calibrate(scores, consistent, epsilon, method):
        return np.full(
            scores.shape[1], cats.conformal_quantile(statistic(scores, consistent), 1 - epsilon)
        )

    assert not validity.proposition_41(inputs=40_000, statistic=statistic).ok
    assert not validity.coverage("shared_all", calibrate=calibrate, **QUICK).ok


def test_bug_calibrating_on_the_test_split_is_caught():
    """Over random splits of one pool the number covered is BetaBinomial; calibrated on the test
    part it hardly varies.
    """
    table = Synthetic(layers=8).table(1000)
    values = worst_score(table.scores("meta"), table.consistent)
    law = validity.covered_law(800, 200, 0.1)

    def uniforms(calibrate_on_test):
        rng, found = np.random.default_rng(0), []
        for trial in range(300):
            keep = split(len(values), trial)
            threshold = cats.conformal_quantile(values[~keep if calibrate_on_test else keep], 0.9)
            covered = (values[~keep] <= threshold).sum()
            found.append(law.cdf(covered - 1) + rng.random() * law.pmf(covered))
        return found

    right = validity.uniform_check("", "", "", uniforms(False), ALARM)
    wrong = validity.uniform_check("", "", "", uniforms(True), ALARM)
    assert right.ok and not wrong.ok


@pytest.mark.parametrize("name", mutations.QUICK)
def test_planted_bug_is_caught(name):
    """A few of tests/mutations.py; `make mutants` runs all."""
    bug = mutations.BUGS[name]
    assert mutations.caught_by(bug) and not mutations.caught_by(bug, planted=False)


def test_there_are_enough_planted_bugs():
    assert len(mutations.BUGS) >= 20 and set(mutations.QUICK) <= set(mutations.BUGS)
    for name, bug in mutations.BUGS.items():  # what is replaced is still there
        source = (mutations.ROOT / "cats" / "stats" / f"{bug.module}.py").read_text()
        assert bug.old in source, name


# --- the laws and the generator themselves
# --------------------------------------------------------------------------


def test_random_splits_follow_the_beta_binomial_law():
    values = np.random.default_rng(3).permutation(200).astype(float)
    check = validity.random_splits(values, n=50, epsilon=0.07, trials=1500, alarm=ALARM)
    assert check.ok, check


def test_beta_law_has_the_right_mean():
    for n, epsilon in ((19, 0.05), (99, 0.07), (100, 0.1)):
        rank = conformal_rank(n, 1 - validity.exact(epsilon))
        assert validity.coverage_law(n, epsilon).mean() == pytest.approx(rank / (n + 1))
        assert validity.covered_law(n, 50, epsilon).mean() == pytest.approx(50 * rank / (n + 1))


@pytest.mark.parametrize(
    "population", [Synthetic(), Synthetic(layers=5, skill=0.3), Synthetic().harder()], ids=repr
)
def test_truth_equals_a_large_sample(population):
    """True risk, layers and coverages against 200,000 inputs; two-sided normal bounds, false alarm
    about 1e-9 each.
    """
    n = 200_000
    scores, consistent, hard = population.draw(n, np.random.default_rng(0))
    right = np.random.default_rng(1).random(n) < population.p_right[hard]
    thresholds = np.random.default_rng(2).random(population.layers - 1)
    wrong = ~np.column_stack([consistent, np.ones(n, bool)])[
        np.arange(n), cats.exit_layers(scores, thresholds) - 1
    ]

    def close(sample, truth):
        return abs(sample.mean() - truth) < stats.norm.isf(5e-10) * sample.std() / np.sqrt(
            len(sample)
        )

    assert close(wrong, population.risk(thresholds))
    assert close(wrong[right], population.risk(thresholds, given_right=True))
    assert close(cats.exit_layers(scores, thresholds), population.mean_layers(thresholds))
    some = ~consistent.all(axis=1)
    for t in (0.2, 0.5, 0.9):
        assert close(worst_score(scores, consistent) <= t, population.coverage(t, "shared_all"))
        assert close(worst_score(scores, consistent)[some] <= t, population.coverage(t, "shared"))
        assert close(
            worst_score(scores, consistent, True) <= t, population.coverage(t, "first_exit")
        )
    at = population.coverage(thresholds, "independent")
    for k in range(population.layers - 1):
        assert close(scores[~consistent[:, k], k] <= thresholds[k], at[k])


def test_synthetic_table_keeps_what_was_drawn():
    population = Synthetic(layers=6, classes=2)
    table = population.table(300, seed=5)
    scores, consistent, _ = population.draw(300, np.random.default_rng(5))
    assert (table.consistent == consistent).all() and (table.scores("meta") == scores).all()
    assert (
        table.sha256 == population.table(300, seed=5).sha256 != population.table(300, seed=6).sha256
    )


@pytest.mark.parametrize("bad", [{"layers": 1}, {"classes": 1}, {"difficulty": (0.5, 0.6)}])
def test_impossible_populations_are_refused(bad):
    with pytest.raises(ValueError):
        Synthetic(**bad)
