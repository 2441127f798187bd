"""Planted bugs in the statistics, each of which a named check has to catch: a check that cannot
fail is no check.

    make mutants                     all of them, some minutes
    python tests/mutations.py pac    those whose name holds "pac"

A bug is a piece of source and what it is replaced by. It is planted in memory, in a process of its
own, where the package and the tests are imported afresh; the check is a function of the test suite.
On the code as it is the same check has to pass, or it would catch anything. The normal suite runs
the `QUICK` of the bugs.
"""

import multiprocessing
import sys
import traceback
import warnings
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import NamedTuple

import hypothesis
import pandas  # noqa: F401  (imported once here, and not by every process)
import scipy.stats  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
ORACLE = "test_calibrators.test_equals_the_pseudo_code"
CLAIM = "test_validity.test_claim_holds"


class Bug(NamedTuple):
    """A planted bug, and the check (a test and its arguments) that has to fail."""

    module: str
    old: str
    new: str
    check: str
    arguments: dict = {}
    at: int = 0  # which occurrence of `old`


def oracle(method):
    return ORACLE, {"method": method}


def claim(name):
    return CLAIM, {"claim": name}


BUGS = {
    # ranks and bounds
    "quantile: n instead of n+1": Bug(
        "quantiles", "level.numerator * (n + 1)", "level.numerator * n", *claim("Lemma A.1, n=20")
    ),
    "quantile: floor instead of ceiling": Bug(
        "quantiles",
        "-(-level.numerator * (n + 1) // level.denominator)",
        "level.numerator * (n + 1) // level.denominator",
        "test_calibrators.test_rank_is_exact_for_decimal_levels",
    ),
    "quantile: largest value instead of ∞": Bug(
        "quantiles",
        "np.append(values, np.inf)[np.minimum(ranks - 1, len(values))]",
        "values[np.minimum(ranks - 1, len(values) - 1)]",
        *oracle("first_exit"),
    ),
    "level: the binary float and not its decimal": Bug(
        "quantiles",
        "Fraction(repr(float(number)))",
        "Fraction(float(number))",
        "test_calibrators.test_rank_is_exact_for_decimal_levels",
    ),
    "most_errors: one too many": Bug(
        "quantiles", "<= delta else m - 1", "<= delta else m", *claim("pac, law")
    ),
    "most_errors: one too many, in ltt": Bug(
        "quantiles", "<= delta else m - 1", "<= delta else m", *claim("ltt, law")
    ),
    "Clopper-Pearson: n-s instead of n-s+1": Bug(
        "quantiles",
        "np.maximum(successes, 1), n - successes + 1",
        "np.maximum(successes, 1), np.maximum(n - successes, 1)",
        "test_calibrators.test_clopper_pearson_solves_its_equation",
    ),
    "Clopper-Pearson: the upper bound": Bug(
        "quantiles",
        'float(probability(delta, "delta")), np.maximum',
        '1 - float(probability(delta, "delta")), np.maximum',
        *claim("Proposition 3.1"),
    ),
    "band: pac's level at every rank": Bug(
        "quantiles",
        "betaincinv(ranks, n + 1 - ranks, band_level(n, delta))",
        "betaincinv(ranks, n + 1 - ranks, float(delta))",
        *claim("band, law"),
    ),
    "band: a crossing forgotten": Bug(
        "quantiles",
        "first[row] -= first[:row] @ log_p",
        "first[row] -= first[1:row] @ log_p[1:]",
        "test_calibrators.test_crossing_in_closed_form",
    ),
    # exits
    "exit at a score equal to its threshold": Bug(
        "exits", "np.greater(scores", "np.greater_equal(scores", *claim("Proposition 4.1")
    ),
    "agreement one layer late": Bug(
        "exits",
        "np.arange(len(exits)), exits - 1]",
        "np.arange(len(exits)), np.minimum(exits, consistent.shape[1])]",
        "test_calibrators.test_agreement_equals_the_slow_one",
    ),
    "records: ties count": Bug(
        "exits",
        "scores[:, 1:] > earlier",
        "scores[:, 1:] >= earlier",
        "test_calibrators.test_records",
    ),
    "records: compared with the layer before alone": Bug(
        "exits",
        "np.maximum.accumulate(least, axis=1)[:, :-1]",
        "least[:, :-1]",
        *oracle("first_exit"),
    ),
    "near-records: one margin instead of two": Bug(
        "exits",
        "scores - 2 * np.asarray(margin)",
        "scores - np.asarray(margin)",
        "test_calibrators.test_without_the_margin_an_exit_escapes",
    ),
    "V: maximum over consistent layers": Bug(
        "exits",
        "wrong = ~before_last if where is False else ~before_last & where",
        "wrong = before_last if where is False else before_last & where",
        *claim("shared_all, law"),
    ),
    "V: last layer of another body taken for F": Bug(
        "exits", "worst[~consistent[:, -1]] = np.inf", "pass", *claim("nearly F, law")
    ),
    "events: the threshold itself not reached": Bug(
        "exits",
        'side="right"',
        'side="left"',
        "test_calibrators.test_wrong_exits_lie_inside_the_controlled_event",
    ),
    # calibrators
    "naive: bound from its tuning half": Bug(
        "calibrators",
        "tune, rest = cal.part(half), cal.part(cal.keep & ~half)",
        "tune = rest = cal.part(half)",
        *claim("naive"),
    ),
    "naive: one error too many": Bug(
        "calibrators",
        "math.floor(epsilon * tune.n)",
        "math.floor(epsilon * tune.n) + 1",
        *oracle("naive"),
    ),
    "independent: weights forgotten": Bug(
        "calibrators",
        "shares = [exact(weight) for weight in weights]",
        "shares = [Fraction(1, cal.early)] * len(weights)",
        "test_calibrators.test_weights_of_independent",
    ),
    "independent: no Bonferroni": Bug(
        "calibrators", "1 - share * epsilon", "1 - epsilon", *claim("Theorem 4.4, tight")
    ),
    "shared: over all inputs": Bug(
        "calibrators",
        "sorted_quantiles(cal.worst_given_some(), levels)",
        "sorted_quantiles(cal.worst(), levels)",
        *claim("Theorem 4.6, law"),
    ),
    "shared_all: over inconsistent inputs alone": Bug(
        "calibrators",
        "sorted_quantiles(cal.worst(), levels)",
        "sorted_quantiles(cal.worst_given_some(), levels)",
        *oracle("shared_all"),
        at=-1,
    ),
    "pac: one rank too low": Bug(
        "calibrators", "worst[cal.n - 1 - m]", "worst[max(cal.n - 2 - m, 0)]", *claim("pac, law")
    ),
    "ltt: no stop": Bug(
        "calibrators",
        "rejected = int(np.argmax(failed))",
        "rejected = int(len(tried) - np.argmin(failed[:-1][::-1])) if not failed[:-1].all() else 0",
        *claim("ltt, law"),
    ),
    "ltt: loose to strict": Bug(
        "calibrators",
        "errors = cal.errors(tried)",
        "errors = cal.errors(tried)[::-1]",
        *oracle("ltt"),
    ),
    "band: one rank too low": Bug(
        "calibrators",
        "values[np.searchsorted(bounds, levels)]",
        "values[np.maximum(np.searchsorted(bounds, levels) - 1, 0)]",
        *claim("band, law"),
    ),
    "band: choices do not share delta": Bug(
        "calibrators", " / int(choices)", "", "test_calibrators.test_choices_share_delta"
    ),
    "static: floor of what has to agree": Bug(
        "calibrators",
        "math.ceil((1 - epsilon) * cal.n)",
        "math.floor((1 - epsilon) * cal.n)",
        *oracle("static"),
    ),
    "a part keeps the whole's values": Bug(
        "calibrators",
        "inside = self.keep[rows]",
        "inside = np.ones(len(rows), bool)",
        "test_calibrators.test_part_equals_a_fresh_set",
    ),
    "labelled: calibrated on all inputs": Bug(
        "calibrators", "cal = cal.part(correct)", "pass", *claim("labelled")
    ),
    # losses and groups
    "crc: nothing added for the new input": Bug(
        "risk",
        "alpha * (len(scores) + 1) - bound",
        "alpha * (len(scores) + 1)",
        "test_calibrators.test_risk_of_zero_and_one_is_first_exit",
    ),
    "crc: the loss at the highest record, not the largest": Bug(
        "risk",
        "np.where(where & (scores > t), before_last, 0.0).max(axis=1)",
        "np.where(where & (scores > t), before_last, 0.0)[:, -1]",
        "test_calibrators.test_risk_equals_its_definition",
    ),
    "groups: one threshold for all": Bug(
        "groups", "cal.part(names == name)", "cal", *claim("groups, law")
    ),
    "groups by prediction: the smallest": Bug(
        "groups",
        "np.max(list(found.values()), axis=0)",
        "np.min(list(found.values()), axis=0)",
        "test_calibrators.test_groups_are_calibrated_each_on_its_own",
    ),
    # monitor
    "monitor: bets against the wrong side": Bug(
        "monitor",
        "np.log1p(-self.bets * self.epsilon)",
        "np.log1p(-self.bets * self.epsilon / 2)",
        "test_monitor.test_equals_the_games_input_by_input",
    ),
    "monitor: alarm too soon": Bug(
        "monitor",
        "over = wealth >= 1 / delta",
        "over = wealth >= 0.2 / delta",
        "test_monitor."
        "test_false_alarms_ever_are_rarer_than_delta_and_peeking_at_a_binomial_test_is_not",
    ),
    # table and trials
    "table: consistent with the layer before F": Bug(
        "table",
        "            return self.predictions[:, -1]\n",
        "            return self.predictions[:, -2]\n",
        "test_table.test_consistent_and_correct",
    ),
    "table: within tau, strictly": Bug(
        "table",
        "np.abs(left - right) <= self.tau",
        "np.abs(left - right) < self.tau",
        "test_table.test_within_tau_means_up_to_it",
    ),
    "measures: a look at the next layer": Bug(
        "measures",
        "logits[:, : k + 1]",
        "logits[:, : k + 2]",
        "test_table.test_measures_equal_the_slow_ones",
        {"measure": "sm"},
    ),
    "trials: tested where calibrated": Bug(
        "trials",
        "part, test = cal.part(keep), ~keep",
        "part, test = cal.part(keep), keep",
        "test_trials.test_equals_doing_it_by_hand",
    ),
}

QUICK = [
    "quantile: floor instead of ceiling",
    "most_errors: one too many, in ltt",
    "records: ties count",
    "V: last layer of another body taken for F",
    "naive: bound from its tuning half",
    "table: within tau, strictly",
]


class Planted(SourceFileLoader):
    """Loads a module with one piece of its source replaced."""

    bug: Bug

    def get_code(self, fullname):
        source = Path(self.path).read_text()
        pieces = source.split(self.bug.old)
        assert len(pieces) > 1, f"{self.bug.module} no longer holds {self.bug.old!r}"
        at = range(len(pieces) - 1)[self.bug.at]
        changed = self.bug.old.join(pieces[: at + 1]) + self.bug.new
        changed += self.bug.old.join(pieces[at + 1 :])
        return compile(changed, self.path, "exec")


class Finder:
    """Puts the planted bug where its module is imported from."""

    def __init__(self, bug):
        self.name, self.bug = f"cats.stats.{bug.module}", bug

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        file = ROOT / "cats" / "stats" / f"{self.bug.module}.py"
        loader = Planted(name, str(file))
        loader.bug = self.bug
        return spec_from_file_location(name, file, loader=loader)


def _run(bug, planted, result):
    """In a process of its own: import everything afresh, with the bug or without, and run its
    check.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] in ("cats", "oracles")]:
        del sys.modules[name]
    module, _, test = bug.check.partition(".")
    sys.modules.pop(module, None)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "stats")]
    if planted:
        sys.meta_path.insert(0, Finder(bug))
    warnings.simplefilter("ignore")
    hypothesis.settings.register_profile("mutants", derandomize=True, database=None)
    hypothesis.settings.load_profile("mutants")
    try:
        arguments = dict(bug.arguments)
        tests = import_module(module)
        check = getattr(tests, test)
        for name, make in getattr(tests, "PLAIN", {}).items():  # fixtures, as plain functions
            if name in check.__code__.co_varnames[: check.__code__.co_argcount]:
                arguments[name] = make()
        check(**arguments)
        result.put("")
    except AssertionError as error:
        result.put(f"{error}"[:200] or "AssertionError")
    except BaseException:
        result.put("raised " + traceback.format_exc().strip().rsplit("\n", 1)[-1][:200])


def caught_by(bug, planted=True):
    """How the bug's check failed, "" if it passed."""
    context = multiprocessing.get_context("fork")
    result = context.SimpleQueue()
    process = context.Process(target=_run, args=(bug, planted, result))
    process.start()
    found = result.get()
    process.join()
    return found


def main(wanted=""):
    bugs = {name: bug for name, bug in BUGS.items() if wanted in name}
    survivors = []
    for bug in {(bug.check, *bug.arguments.values()): bug for bug in bugs.values()}.values():
        if broken := caught_by(bug, planted=False):
            survivors.append(f"{bug.check} {bug.arguments} fails without a bug: {broken}")
    for name, bug in bugs.items():
        found = caught_by(bug)
        by = " ".join([bug.check, *map(str, bug.arguments.values())])
        print(f"{'caught' if found else 'SURVIVES':9} {name:52} {by}", flush=True)
        if not found:
            survivors.append(name)
    print(f"{len(bugs)} planted, {len(survivors)} survived")
    return survivors


if __name__ == "__main__":
    sys.exit("\n".join(main(*sys.argv[1:])))
