"""The pieces of `make rehearsal`: stand-ins that load like the real ones, a profile that is only
made smaller, and a check that sees what is missing or misnamed.
"""

import json

import matplotlib.pyplot as plt
import pytest
import rehearsal
import yaml
from batches import ROOT
from transformers import AutoConfig, AutoTokenizer

from cats.paper import style
from cats.train import tasks

PAPER, SHORT = (
    yaml.safe_load((ROOT / f"notebooks/profiles/{name}.yaml").read_text())
    for name in ("paper", "short")
)


def test_every_model_and_task_of_the_profile_has_a_stand_in():
    known = {task for task, _ in rehearsal.names(PAPER["runs"]).values()}
    assert known == set(rehearsal.MIRRORS)
    used = {model for _, model in rehearsal.names(PAPER["runs"]).values()}
    assert used == set(rehearsal.MODELS) <= set(style.MODELS)


def test_the_profile_is_only_made_smaller():
    small = rehearsal.smaller(PAPER, SHORT)
    assert rehearsal.names(small["runs"]) == rehearsal.names(PAPER["runs"])
    assert small["parameters"].keys() == PAPER["parameters"].keys()
    assert all(run["training"]["bf16"] for run in small["runs"])
    for name, values in PAPER["parameters"].items():  # what the profile says itself stays
        assert small["parameters"][name].items() >= values.items()


def test_stand_ins_load_as_the_real_ones_do(tmp_path, monkeypatch):
    monkeypatch.setattr(rehearsal, "ROWS", {"train": 30, "validation": 10, "test": 10})
    texts = []
    for task in ("vitaminc", "stsb"):
        texts += rehearsal.data_set(tmp_path, task)
        data = tasks.load(task, tmp_path / "datasets" / task)
        assert {split: len(part) for split, part in data.items()} == rehearsal.ROWS
        assert len(set(data["train"]["label"][:])) > 1
    for name, (kind, tokenizer, layers) in rehearsal.MODELS.items():
        rehearsal.stand_in(tmp_path, name, texts)
        config = AutoConfig.from_pretrained(tmp_path / "models" / name)
        read = AutoTokenizer.from_pretrained(tmp_path / "models" / name)
        assert (type(config), type(read)) == (kind, tokenizer)
        assert config.num_hidden_layers == layers and config.pad_token_id == read.pad_token_id


@pytest.fixture
def figures(tmp_path):
    """A figure of one table of Albert-base, without a title."""
    record = {"parameters": {}, "inputs": {"imdb": "a hash"}}
    (tmp_path / "22_consistency.json").write_text(json.dumps(record))
    return tmp_path


@pytest.mark.parametrize(
    "title, fault",
    [
        ("Figure 3: Albert-base, 12 layers", None),
        ("Figure 3: MobileBERT, 24 layers", "names MobileBERT and is about Albert-base"),
        ("Figure 3", "does not say that it is about Albert-base"),
    ],
)
def test_a_picture_of_another_model_is_seen(figures, title, fault):
    style.use_style()
    figure, axis = plt.subplots()
    axis.set_title(title)
    figure.savefig(figures / "22_consistency.pdf")
    plt.close(figure)
    tables, profile = {"a hash": "albert-base-v2"}, PAPER | {"runs": PAPER["runs"][4:5]}
    found = [
        line for line in rehearsal.wrong(figures, profile, tables, []) if "not made" not in line
    ]
    assert len(found) == bool(fault) and all(fault in line for line in found)


def test_what_is_not_there_is_named(figures):
    committed = [ROOT / "figures" / name for name in ("22_consistency.csv", "10_calibration.csv")]
    committed.append(ROOT / "figures/05_scores-sentiment-demo-0.csv")
    lines = list(rehearsal.wrong(figures, PAPER, {}, committed))
    assert "22_consistency.csv was not made" in lines
    assert "32_other_backbones_c3.png was not made" in lines
    assert "05_scores-stsb-roberta-large-0.csv was not made" in lines
    assert not any("10_calibration" in line for line in lines)  # the profile has no such notebook
    assert len(list(rehearsal.shipped(figures, PAPER))) == 12 * 2 * 4
