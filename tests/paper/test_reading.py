"""Readings follow their numbers: whatever a file says, the words say the same."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from cats.paper import captions, facts, reading
from cats.paper.places import COMMITTED, ROOT

TEMPLATES = sorted(reading.READINGS.glob("[0-9][0-9].md"))
READ = sorted(COMMITTED.glob("*_reading*.md"))
# all their facts are in files
ALONE = [
    "01_tasks",
    "11_theorems",
    "21_tasks_and_features",
    "22_consistency",
    "23_tables",
    "24_exit_layers",
    "30_naive",
    "31_measures",
    "32_other_backbones",
    "40_beyond",
    "41_exact_law",
    "42_heads",
    "43_choosing",
    "45_monitor",
    "60_scale",
]


def of_template(path):
    return any(path.name.startswith(template.stem) for template in TEMPLATES)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_opens_with_its_table(path):
    lines = path.read_text().splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert lines[0] == reading.HEAD and lines[: len(rows)] == rows
    cells = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert set(cells) == {5} and len(rows) >= 3
    assert [name for name in facts.ALL if name.startswith(path.stem)]


@pytest.mark.parametrize("path", [p for p in READ if of_template(p)], ids=lambda path: path.stem)
def test_a_reading_is_short_and_whole(path):
    text = path.read_text()
    assert text.startswith(reading.HEAD) and 0 < reading.words(text) <= reading.WORDS
    assert not re.search(r"[{}]|\bnan\b|\bNone\b", text)


@pytest.mark.parametrize("notebook", ALONE)
def test_a_committed_reading_says_what_its_numbers_say(notebook):
    path = COMMITTED / f"{notebook}_reading.md"
    assert path.read_text() == reading.render(notebook, folder=COMMITTED) + "\n"


def test_nothing_is_filled_in_silence():
    with pytest.raises(KeyError, match="asks for layers; its facts are kept"):
        reading.fill("{layers}", dict(kept=True))
    with pytest.raises(ValueError, match="not a number"):
        reading.fill("{layers:.1f}", dict(layers=float("nan")))
    assert reading.fill("a {x}\nb {y}", dict(x=np.bool_(False), y=None)) == "a no"


# --- facts against numbers one can check by eye


def sweep(**consistency):
    """22's files: two methods with a promise at ε = 0.1, four layers against three."""
    rows = []
    for method, layers in (("independent", 5), ("shared", 4), ("first_exit", 3)):
        mean = consistency.get(method, 0.95)
        spread = dict(consistency_low=mean - 0.01, consistency_high=mean + 0.01)
        about = dict(task="imdb", method=method, measure="meta", epsilon=0.1)
        rows.append(about | dict(consistency_mean=mean, layers_mean=layers) | spread)
    return pd.DataFrame(rows)


@pytest.fixture
def folder(tmp_path):
    paper = dict(task="imdb", method="shared", measure="meta", target=0.9, share=40, share_paper=50)
    pd.DataFrame([paper]).to_csv(tmp_path / "22_consistency_paper.csv", index=False)
    made = '{"parameters": {"backbone": "mobilebert-uncased"}}'
    (tmp_path / "22_consistency.json").write_text(made)
    return tmp_path


def test_words_follow_the_numbers(folder):
    sweep().to_csv(folder / "22_consistency.csv", index=False)
    found = facts.facts("22_consistency", folder=folder)
    assert found["reached"] == "3 of 3" and found["reach"] and found["margin"] == pytest.approx(5)
    assert found["margin_side"] == "above" and found["saved"] == "1.0" and found["wins"] is None
    assert found["backbone"] == "MobileBERT" and found["cheaper"] == "1 of 1"
    text = reading.render("22_consistency", folder=folder)
    assert "5.00 points above" in text and "meta is cheaper" not in text

    sweep(shared=0.85).to_csv(folder / "22_consistency.csv", index=False)  # far below 0.9
    text = reading.render("22_consistency", folder=folder)
    assert "| 2 of 3 means | no |" in text and "5.00 points below" in text

    sweep(shared=0.899).to_csv(folder / "22_consistency.csv", index=False)  # within the noise
    assert "| 2 of 3 means | yes |" in reading.render("22_consistency", folder=folder)


def test_the_papers_own_encoder_is_not_another(folder):
    sweep().to_csv(folder / "22_consistency.csv", index=False)
    assert "other encoder" in reading.render("22_consistency", folder=folder)
    made = '{"parameters": {"backbone": "albert-xlarge-v2"}}'
    (folder / "22_consistency.json").write_text(made)
    text = reading.render("22_consistency", folder=folder)
    assert "same encoder" in text and "Albert-xlarge" not in text


@pytest.mark.parametrize("run, here", [("imdb-x-0", "0.94 (test) | 0.930 | no"), ("a-b-0", None)])
def test_f_is_held_against_the_papers_on_the_same_task(tmp_path, run, here):
    log = pd.DataFrame({"loss": [0.7, 0.2], "epoch": [1, 2]})
    log.to_csv(tmp_path / f"02_fine_tuning-{run}.csv", index=False)
    told = dict(performance=0.93, metric="accuracy")
    text = reading.render("02_fine_tuning", run, tmp_path, **told)
    assert (here or "0.90 to 0.94 (test) | 0.930 | other tasks") in text


def test_a_shortfall_is_held_against_the_noise_of_one_table():
    assert facts.reach([-0.012], [0.01])["reach"]  # 3 · 0.01 / √5 = 0.0134
    found = facts.reach([0.02, -0.014], [0.01, 0.01])
    assert not found["reach"] and found["reached"] == "1 of 2"
    assert found["margin"] == pytest.approx(1.4) and found["margin_side"] == "below"


def test_theorems_count_claims_and_controls(tmp_path):
    claim = lambda name, verdict: dict(claim=name, verdict=verdict, false_alarm=1e-5)
    claims = [claim("Theorem 4.6: law", "holds"), claim("pac: law", "FAILS")]
    pd.DataFrame(claims).to_csv(tmp_path / "11_theorems_claims.csv", index=False)
    pd.DataFrame([claim("a", "FAILS")]).to_csv(tmp_path / "11_theorems_controls.csv", index=False)
    (tmp_path / "11_theorems_claims.json").write_text('{"parameters": {"trials": 10}}')
    found = facts.facts("11_theorems", folder=tmp_path)
    assert (found["held"], found["holds"]) == ("1 of 1", True)
    assert (found["added"], found["added_hold"]) == ("0 of 1", False)
    assert (found["caught"], found["all_caught"]) == ("1 of 1", True)


def test_exits_are_read_from_their_means(tmp_path):
    rows = [
        ("imdb", method, e, layers, 0.99 - e, 1000, 1000, 0.5, 0.1)
        for method, e, layers in (
            ("shared", 0.05, 8),
            ("shared", 0.2, 5),
            ("first_exit", 0.05, 7),
            ("first_exit", 0.2, 6),
        )
    ]
    columns = "task method epsilon layers consistency validation test half last".split()
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / "24_exit_layers_means.csv", index=False)
    found = facts.facts("24_exit_layers", folder=tmp_path)
    assert found["moves"] == "IMDB 8.0 → 5.0" and found["falls"]
    assert not found["never_later"]  # 6 > 5 at ε = 0.2
    assert found["worst_side"] == "below" and found["worst"] == pytest.approx(1)
    assert found["kept"]  # one point is within three standard errors of a thousand inputs


def watched(folder, recalibrated=0.96, late=500.0):
    """45's files: one task, a hundred streams, a shift found after 200 inputs or `late`."""
    quiet = [
        ("just kept", "monitor", 2, True),
        ("just kept", "p-values", 9, False),
        ("pac", "monitor", 0, True),
        ("first_exit", "monitor", 20, False),
    ]
    quiet = pd.DataFrame(quiet, columns=["threshold", "way", "alarms", "within"])
    quiet.assign(streams=100).to_csv(folder / "45_monitor_quiet.csv", index=False)
    hard = dict(part="hardest quarter", shift="sudden")
    delay = [hard | dict(audit=0.1, median=late), hard | dict(audit=1.0, median=200.0)]
    pd.DataFrame(delay).to_csv(folder / "45_monitor.csv", index=False)
    again = [("negative", 0.94, 0.97), ("hardest quarter", 0.88, recalibrated)]
    again = pd.DataFrame(again, columns=["part", "shifted", "recalibrated"])
    again.assign(audit=12, layers=6).to_csv(folder / "45_monitor_again.csv", index=False)
    made = dict(epsilon=0.05, delta=0.01, inputs=3000, begin=1000, share=0.1, few=50)
    for name in ("45_monitor", "45_monitor_quiet"):
        (folder / f"{name}.json").write_text(json.dumps(dict(parameters=made)))


def test_a_watched_promise_is_read_from_its_streams(tmp_path):
    watched(tmp_path)
    found = facts.facts("45_monitor", folder=tmp_path)
    assert (found["kept"], found["naive"], found["marginal"]) == ("0.0 to 2.0", "9.0", "20.0")
    assert found["quiet"] and found["naive_fails"] and found["marginal_fails"]
    assert (found["soon"], found["late"]) == ("200", "500")
    assert (found["cost"], found["mild"], found["shifted"]) == ("20", "6.0", "88")
    assert found["restores"] and found["restored"] == "96.0 to 97.0"
    text = reading.render("45_monitor", folder=tmp_path)
    assert "| 0.0 to 2.0 % of 100 a task | yes |" in text and reading.words(text) <= reading.WORDS

    watched(tmp_path, recalibrated=0.94, late=np.inf)  # not restored, and never found
    text = reading.render("45_monitor", folder=tmp_path)
    assert "| 94.0 to 97.0 % for 95 % | no |" in text and "after more than 2,000 where 10 %" in text


def test_a_cascade_is_read_from_what_it_was_seen_to_do(tmp_path):
    (tmp_path / "51_cascade.json").write_text('{"parameters": {"costs": [0.1, 1.0]}}')
    agrees, exits = np.arange(100) < 92, np.where(np.arange(100) < 60, 1, 2)
    seen = dict(agrees=agrees, exits=exits, epsilon=0.1, calibrated=500, alone=0.8)
    found = facts.facts("51_cascade", folder=tmp_path, **seen)
    assert found["cost"] == pytest.approx(0.6 * 0.1 + 0.4 * 1.1) and found["cheaper"]
    assert found["kept"] and found["answered"] == 0.6
    seen |= dict(agrees=np.arange(100) < 75)  # fifteen short of what was promised
    assert not facts.facts("51_cascade", folder=tmp_path, **seen)["kept"]


def test_seconds_name_what_they_were_measured_on(tmp_path):
    """25 on tables of six layers: their depth, the architecture and the machine are those that ran,
    whichever they were.
    """
    rows = [
        dict(task="topics", method=f"{method}/meta", target=0.9, layers=layers, share_32=50.0)
        | {"batch 32, BERT": 50.0, "paper_time": 55.0, "p50": 40, "p95": 80}
        for method, layers in (("first_exit", 2), ("shared", 3))
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "25_efficiency.csv", index=False)
    curve = dict(architecture="BERT 12 x 384", measure="meta", layer=range(1, 13), time=1.0)
    pd.DataFrame(curve).to_csv(tmp_path / "25_efficiency_by_exit.csv", index=False)
    made = {
        "parameters": {"architecture": "BERT 12 x 384", "layers": 6, "repeats": 6},
        "measured": {"machine": "4 threads of Some Processor", "repeats": 6},
    }
    (tmp_path / "25_efficiency.json").write_text(json.dumps(made))
    text = reading.render("25_efficiency", folder=tmp_path)
    assert "| 55 % (A100) | 50 % (4 threads of Some Processor) |" in text
    assert "2.00 of 6 layers" in text and "of F's time (BERT)" in text and "Mobile" not in text


# --- captions


def test_every_picture_and_table_has_one_caption():
    shown = [*COMMITTED.glob("*.png"), *COMMITTED.glob("*.tex")]
    bare = [path.name for path in shown if captions.caption(path.stem) == path.stem]
    assert bare == []
    assert captions.caption("22_consistency_regression") != captions.caption("22_consistency")
    assert captions.caption("26_comparison-ag_news-bge-small-en-v1.5-0").startswith("Other ways")


@pytest.mark.parametrize("path", sorted(COMMITTED.glob("*.tex")), ids=lambda path: path.stem)
def test_a_latex_table_could_stand_in_a_paper(path):
    if path.stem.startswith(("25_", "26_")):
        pytest.skip("measured: remade with the record")
    text = path.read_text()
    assert text.startswith(r"\begin{table}") and text.rstrip().endswith(r"\end{table}")
    assert rf"\label{{tab:{path.stem}}}" in text and text.count(r"\caption{") == 1
    assert r"\toprule" in text and r"\bottomrule" in text


def test_the_best_row_that_promises_is_bold():
    text = (COMMITTED / "23_tables_classification.tex").read_text()
    assert r"\cmidrule(lr){2-4}" in text and r"\multicolumn{3}{c}{IMDB}" in text
    bold = [line for line in text.splitlines() if r"\bfseries" in line]
    assert bold and not any("gray" in line for line in bold)


def test_readings_are_where_the_notebooks_look():
    assert reading.READINGS == ROOT / "notebooks/readings" and len(TEMPLATES) >= 20
    assert Path(reading.path("22_consistency")).name == "22.md"
