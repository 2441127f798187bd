"""The explorer computes what Python computes: every threshold and every exit, on every shipped
table. The page's own script runs in node here, and in a browser in test_browser.py.
"""

import copy
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from explored import ASKED, EVERYTHING, differences
from hypothesis import given
from hypothesis import strategies as st

from cats.paper import explorer, store
from cats.paper.places import COMMITTED
from cats.stats.quantiles import most_errors
from cats.stats.table import ScoreTable

NODE = pytest.mark.skipif(not shutil.which("node"), reason="there is no node to run the page")


def plain_table(classes, inputs=60):
    rng = np.random.default_rng(classes)
    labels = rng.integers(0, classes, inputs) if classes > 1 else rng.normal(2, 1, inputs)
    meta = rng.uniform(0.05, 1, (inputs, 4))
    return ScoreTable(rng.normal(2, 1, (inputs, 5, classes)), meta, labels)


def script(html, name):
    """The text of one of the page's scripts."""
    return re.search(rf'<script[^>]* id="{name}">(.*?)</script>', html, re.S)[1]


def run(html, expression, tmp_path):
    """What an expression of the page's own functions and data is, in node."""
    (tmp_path / "data.json").write_text(script(html, "data"))
    read = "const data = JSON.parse(require('fs').readFileSync('data.json'));"
    say = f"console.log(JSON.stringify({expression}));"
    (tmp_path / "page.js").write_text("\n".join([script(html, "code"), EVERYTHING, read, say]))
    command = ["node", "page.js"]
    return json.loads(subprocess.run(command, cwd=tmp_path, check=True, capture_output=True).stdout)


@pytest.fixture(scope="module")
def samples():
    return explorer.samples()


@NODE
@pytest.mark.parametrize("what", ["test", "validation"])
def test_the_page_computes_what_python_computes(what, tmp_path):
    """On every shipped table: those of the page, and those of the validation sets."""
    samples = explorer.samples(what=what)
    page = explorer.page(samples)
    shipped = [entry for entry in store.manifest().values() if entry["what"] == what]
    assert len(samples) == len(shipped) >= 9 and len(ASKED) == 19
    said = run(page, f"everything(data, {list(ASKED)})", tmp_path)
    assert list(differences(samples, said)) == []


@NODE
def test_the_comparison_sees_a_single_changed_score(samples, tmp_path):
    """The control: one score of one test input, on a threshold in the page and a step above it in
    Python.
    """
    sample = copy.deepcopy(samples[0])
    thresholds, exits = explorer.answer(sample, "meta", "first_exit", 500)
    i = int(np.argmax(exits <= len(thresholds)))
    place = sample.half + i, exits[i] - 1
    sample.codes["meta"][place] = np.searchsorted(explorer.GRID, thresholds[0])
    page = explorer.page([sample])
    sample.codes["meta"][place] += 1
    said = run(page, f"everything(data, {list(ASKED)})", tmp_path)
    assert any(
        where.startswith("exits") and where.endswith("'meta', 'first_exit', 500)")
        for where in differences([sample], said)
    )


def test_crc_on_the_page_would_be_first_exit(samples):
    for sample in samples:
        for measure in sample.codes:
            one, other = (
                explorer.answer(sample, measure, way, 500) for way in ("crc", "first_exit")
            )
            assert np.array_equal(one[0], other[0])


@NODE
def test_binomial_bounds_in_whole_numbers(tmp_path):
    generator = np.random.default_rng(0)
    cases = [(int(n), int(e)) for n, e in generator.integers(1, (1200, 5000), (60, 2))]
    cases += [(1000, e) for e in explorer.EPSILONS] + [(90, 500), (89, 500)]
    page = explorer.page([])
    said = run(page, f"{json.dumps(cases)}.map(([n, e]) => mostErrors(n, e, data.parts))", tmp_path)
    assert said == [most_errors(n, e / explorer.PARTS, 0.01) for n, e in cases]


def test_the_committed_page_is_that_of_the_shipped_tables(samples):
    written = (COMMITTED / "explorer.html").read_text()
    assert written == explorer.page(samples), "make it anew: python -m cats.paper.explorer figures"
    assert len(written.encode()) < 4_000_000
    assert max(len(sample.rows) for sample in samples) == 2000
    outside = set(re.findall(r"https?://[^\"'\s]+", written)) - {"http://www.w3.org/2000/svg"}
    assert not outside  # it works without a network


@given(st.floats(0, 1))
def test_a_score_goes_to_the_nearest_place(score):
    place = explorer.nearest(np.array([score]))[0]
    assert np.abs(explorer.GRID - score).min() == abs(explorer.GRID[place] - score)


def test_the_grid_rises_and_numbers_are_packed_in_letters():
    assert (np.diff(explorer.GRID) > 0).all()
    codes = np.arange(64**2)
    text = explorer.pack(codes, 2)
    places = np.array([explorer.LETTERS.index(letter) for letter in text]).reshape(-1, 2)
    assert (places @ [64, 1] == codes).all()


@pytest.mark.parametrize("classes", [3, 1])
def test_a_sample_says_what_its_table_says(classes):
    table = plain_table(classes)
    sample = explorer.Sample.of(table, {"task": "mine"})
    assert len(sample.rows) == len(table) and sorted(sample.rows) == list(range(len(table)))
    taken = table.take(sample.rows)
    assert np.abs(sample.scores("meta") - taken.scores("meta")).max() < 0.0013
    if classes > 1:
        assert (sample.consistent == taken.consistent).all()
        assert sample.classes == ("class 0", "class 1", "class 2")
    else:  # predictions within a step of tau may change sides
        near = np.abs(table.losses("difference")[sample.rows] - table.tau) < 1 / explorer.UNIT
        assert (near | (sample.consistent == taken.consistent)).all()


def test_own_tables_may_lack_labels_or_meta_scores():
    table = plain_table(3)
    sample = explorer.Sample.of(ScoreTable(table.logits), {"task": "mine"})
    assert list(sample.codes) == ["sm"] and sample.packed()["labels"] == ""


def test_a_name_cannot_end_the_script():
    sample = explorer.Sample.of(plain_table(3), {"task": "</script><b>", "encoder": "e"})
    assert "</script><b>" not in explorer.page([sample])
