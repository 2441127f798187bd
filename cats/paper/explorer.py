"""The explorer: one page on which ε is a slider and every number is computed in the browser.

    python -m cats.paper.explorer figures     # writes figures/explorer.html

The page holds at most 2,000 test inputs of every shipped table, the first half to calibrate on and
the second to test on. Scores are quantised first, 12 bits each, two letters in the page; Python and
the page then compute with the very same numbers, so they agree to the last exit (`answer` is the
page's oracle, `tests/paper/test_explorer.py` compares). What quantising changes is small: steps of
0.005 in log-odds, fine where scores are close to 1.
"""

import json
import sys
import warnings
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from pathlib import Path

import numpy as np
from scipy.special import expit

from cats._io import writing
from cats.paper import store, style
from cats.paper.places import COMMITTED
from cats.stats.calibrators import FIXED_SEQUENCE, CalibrationSet, halves, thresholds_from
from cats.stats.exits import exit_layers
from cats.stats.quantiles import Bools, CalibrationWarning, Floats, Ints, coverage_band
from cats.stats.table import ScoreTable
from cats.train.tasks import TASKS

INPUTS, SEED = 2000, 0
# crc is left out: with the loss G ≠ F it is first_exit, threshold for threshold
METHODS = ("static", "threshold", "naive", "independent", "shared", "shared_all", "first_exit")
METHODS += ("pac", "ltt", "band")
DELTA = 0.01  # of pac, ltt and band
MEASURES = {"meta": "meta classifier", "sm": "softmax (p max)"}
RECIPES = {"paper": "paper: from labels", "distilled": "distilled: from F's answers"}
PARTS = (
    10_000  # ε is a whole number of these parts of 1, so that ranks are exact in the browser, too
)
STEPS = (10, 11, 12, 13, 14, 15, 16, 18, 20, 22, 24, 26, 28, 30, 33, 36, 40, 45, 50, 55, 60, 65)
STEPS += (70, 75, 80, 85, 90, 95)  # a decade, nearly even in logarithms
EPSILONS = sorted({step * ten for ten in (1, 10, 100) for step in STEPS if step * ten <= 5000})

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
LOW, STEP = -5.0, 0.005  # of the grid of scores, in log-odds: from 0.0067 to 1 - 1.9e-7
GRID = np.round(expit(LOW + STEP * np.arange(64**2)), 10)
UNIT, SHIFT = 512, 1.5  # outputs of a regression: (code / UNIT) - SHIFT, from -1.5 to 6.5


def nearest(scores: Floats) -> Ints:
    """The place on GRID nearest to each score."""
    return np.searchsorted((GRID[1:] + GRID[:-1]) / 2, scores)


def pack(codes: Ints, letters: int) -> str:
    """Numbers as letters, row by row, so many a number.

    >>> pack(np.array([[0, 65], [4095, 1]]), 2), pack(np.array([3, 1]), 1)
    ('AABB//AB', 'DB')
    """
    digits = [codes.ravel() // 64**i % 64 for i in reversed(range(letters))]
    alphabet = np.frombuffer(LETTERS.encode(), np.uint8)
    return alphabet[np.stack(digits, axis=1)].tobytes().decode()


@dataclass(frozen=True, eq=False)
class Sample:
    """Some inputs of a ScoreTable in quantised numbers: what the page knows of it.

    about   task, encoder, recipe, seed
    rows    (n,) where the inputs are in the table; the first half is for calibration
    codes   {measure: (n, l-1)} places on GRID
    said    (n, l) what each layer predicts: a class, or a number of UNITs above -SHIFT
    labels  (n,) the same for the label; (0,) where there are none
    classes names of the classes; none for a regression
    reach   how far apart two predictions may be and count as equal: 0, or tau in UNITs
    """

    about: dict
    rows: Ints
    codes: dict[str, Ints]
    said: Ints
    labels: Ints
    classes: tuple[str, ...]
    reach: int

    @classmethod
    def of(cls, table: ScoreTable, about: dict, inputs: int = INPUTS) -> "Sample":
        """Inputs of a table, drawn with a fixed seed."""
        rows = np.random.default_rng(SEED).permutation(len(table))[:inputs]
        table = table.take(rows)
        codes = {
            measure: nearest(table.scores(measure))
            for measure in MEASURES
            if (table.meta is not None if measure == "meta" else not table.regression)
        }
        said = table.predictions
        labels = np.empty(0, int) if table.labels is None else table.labels
        classes, reach = (), 0
        if table.regression:
            said, labels = (
                np.clip(np.rint((values + SHIFT) * UNIT), 0, 64**2 - 1).astype(int)
                for values in (said, labels)
            )
            reach = int(table.tau * UNIT)
        else:
            known = TASKS[about["task"]].labels if about["task"] in TASKS else ()
            classes = known or tuple(f"class {i}" for i in range(table.n_classes))
        return cls(about, rows, codes, said, labels, classes, reach)

    @property
    def half(self) -> int:
        """How many inputs are for calibration; the others are for the test."""
        return len(self.rows) // 2

    @cached_property
    def consistent(self) -> Bools:
        """Whether F_k(x) = F(x), (n, l-1)."""
        return np.abs(self.said[:, :-1] - self.said[:, -1:]) <= self.reach

    def scores(self, measure: str) -> Floats:
        return GRID[self.codes[measure]]

    @cache  # noqa: B019  (there are few samples, and they are kept)
    def calibration(self, measure: str) -> CalibrationSet:
        """The first half, sorted once for every ε and method."""
        return CalibrationSet(self.scores(measure)[: self.half], self.consistent[: self.half])

    def packed(self) -> dict:
        """The sample as the page reads it."""
        width = 1 if self.classes else 2
        return self.about | {
            "layers": self.said.shape[1],
            "rows": self.rows.tolist(),
            "classes": self.classes,
            "reach": self.reach,
            "scores": {measure: pack(codes, 2) for measure, codes in self.codes.items()},
            "said": pack(self.said, width),
            "labels": pack(self.labels, width),
        }


def samples(folder: str | Path = store.FOLDER, what: str = "test") -> list[Sample]:
    """One of every shipped table, in the order of the page: MobileBERT first, the paper's tasks in
    order, then recipes and seeds. The page has those of the test sets.
    """
    entries = [entry for entry in store.manifest(folder).values() if entry["what"] == what]
    order = {"task": list(style.TASKS), "backbone": list(style.MODELS)}

    def place(entry: dict) -> tuple:
        known = [
            (names.index(entry[key]) if entry[key] in names else len(names), entry[key])
            for key, names in order.items()
        ]
        return *known, entry.get("recipe", store.PAPER) != store.PAPER, entry.get("seed", 0)

    found = []
    for entry in sorted(entries, key=place):
        recipe, seed = entry.get("recipe", store.PAPER), entry.get("seed", 0)
        table = store.table(entry["task"], entry["backbone"], what, folder, recipe, seed)
        about = {
            "task": entry["task"],
            "encoder": entry["backbone"],
            "recipe": recipe,
            "seed": seed,
        }
        found.append(Sample.of(table, about))
    return [sample for sample in found if sample.codes]  # without any score nothing leaves early


def answer(sample: Sample, measure: str, method: str, parts: int) -> tuple[Floats, Ints]:
    """What the page must show: the thresholds (l-1,) at ε = parts/PARTS, and where the inputs of
    the test half leave.
    """
    epsilon = Fraction(parts, PARTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)  # the page says it in its own words
        thresholds = thresholds_from(sample.calibration(measure), epsilon, method)
    return thresholds, exit_layers(sample.scores(measure)[sample.half :], thresholds)


def sizes(found: list[Sample]) -> dict[int, dict]:
    """What only the number of calibration inputs decides: the half that naive tunes on, and band's
    bounds.
    """
    return {
        n: {
            "tuned": pack(halves(np.ones(n, bool), seed=0).astype(int), 1),
            "band": coverage_band(n, Fraction(str(DELTA))).tolist(),
        }
        for n in sorted({sample.half for sample in found})
    }


def page(found: list[Sample]) -> str:
    """The page with its data: one file that needs nothing else."""
    here = Path(__file__).parent
    slugs = {sample.about[key] for sample in found for key in ("task", "encoder")}
    names = {slug: style.written(slug) for slug in sorted(slugs)} | RECIPES
    data = {
        "parts": PARTS,
        "epsilons": EPSILONS,
        "grid": GRID.tolist(),
        "unit": UNIT,
        "shift": SHIFT,
        "sequence": FIXED_SEQUENCE.tolist(),
        "sizes": sizes(found),
        "methods": {method: style.METHODS[method].colour for method in METHODS},
        "measures": MEASURES,
        "names": names,
        "tables": [sample.packed() for sample in found],
    }
    written = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    scripts = [(here / name).read_text() for name in ("explorer.js", "explorer_page.js")]
    html = (here / "explorer.html").read_text()
    return html.replace("{{data}}", written).replace("{{script}}", "\n".join(scripts))


def write(figures: str | Path = COMMITTED, folder: str | Path = store.FOLDER) -> Path:
    """figures/explorer.html from the shipped tables."""
    path = Path(figures) / "explorer.html"
    with writing(path) as aside:
        aside.write_text(page(samples(folder)))
    return path


if __name__ == "__main__":
    print(write(*sys.argv[1:]))
