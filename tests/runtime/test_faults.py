"""Nothing silently wrong: each fault here once passed without a word, or lost something."""

import json
import logging
import os
import random
import re
import resource
import shutil
import stat
import sys
import warnings
from collections import Counter

import numpy as np
import pytest
import soak
import tiny
import torch
from batches import ROOT

from cats import CAT
from cats._io import MASK, READY, replacing
from cats.train import demo
from cats.train.run import Run
from cats.train.states import load_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::cats.CalibrationWarning")
TEXTS = tiny.texts()
hooks: list = []  # these are told of every file operation
sys.addaudithook(lambda name, args: [hook(name, args) for hook in hooks])


@pytest.fixture(scope="module")
def cat():
    return tiny.fit()


@pytest.fixture(scope="module")
def saved(cat, tmp_path_factory):
    return cat.save_pretrained(tmp_path_factory.mktemp("faults") / "cat")


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def tree(folder):
    """Every file below a folder, by name."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes))


# --- nothing is lost ---


@pytest.mark.parametrize("limit", [1_000, 15_000])
def test_a_full_disk_leaves_the_old_cat(cat, copy, limit):
    """Files may not grow beyond some bytes, as on a disk that is full."""
    before, (soft, hard) = tree(copy), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(Exception, match="(?i)large"):
            cat.save_pretrained(copy)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert tree(copy) == before and not list(copy.glob(".*"))


def test_a_killed_replacement_is_all_or_nothing(tmp_path):
    """Stopped before every single step, and gone on with by whoever comes next."""
    for stop in range(40):
        folder = tmp_path / str(stop)
        (folder / "b").mkdir(parents=True)
        for name in ("a", "b/x", "gone", "notes"):
            (folder / name).write_text("old")
        calls = 0

        def count(name, args):
            nonlocal calls
            if name in ("os.rename", "os.remove", "os.rmdir") and str(folder) in str(args):
                calls += 1
                if calls > stop >= 0:
                    raise KeyboardInterrupt

        hooks.append(count)
        try:
            with replacing(folder, ["a", "b", "gone"]) as new:
                (new / "b").mkdir()
                for name in ("a", "b/y"):
                    (new / name).write_text("new")
            finished = True
        except KeyboardInterrupt:
            finished = False
        finally:
            hooks.remove(count)
        ready = (folder / READY).exists() or finished
        with replacing(folder, []):  # goes on first
            pass
        found = {name: value.decode() for name, value in tree(folder).items()}
        new = {"a": "new", "b/y": "new", "notes": "old"}
        old = dict.fromkeys(("a", "b/x", "gone", "notes"), "old")
        assert found == new if ready else found in (old, new), stop
        if finished:
            return
    raise AssertionError("it never came to its end")


def test_another_readme_is_left_alone(cat, copy, caplog):
    (copy / "README.md").write_text("mine")
    (copy / "notes.txt").write_text("mine, too")
    with caplog.at_level(logging.WARNING):
        cat.save_pretrained(copy)
    assert (copy / "README.md").read_text() == (copy / "notes.txt").read_text()[:4] == "mine"
    assert "is left alone" in caplog.text and CAT.from_pretrained(copy)
    (copy / "README.md").unlink()
    cat.save_pretrained(copy)
    card = (copy / "README.md").read_text("utf-8")
    assert "1-ε" in card
    cat.save_pretrained(copy)  # its own is written again
    assert (copy / "README.md").read_text("utf-8") == card


def test_a_reference_leaves_no_old_backbone_and_never_removes_f_itself(saved, copy, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(saved / "backbone", model)
    thin = CAT.from_pretrained(copy, backbone=model)
    with pytest.raises(ValueError, match="F itself lies in"):
        CAT.from_pretrained(copy).save_pretrained(copy, backbone=False)
    thin.save_pretrained(copy, backbone=False)
    assert not (copy / "backbone").exists() and (copy / "tokenizer").is_dir()
    where = json.loads((copy / "cat.json").read_text())["backbone"]["where"]
    assert where == str(model.resolve())
    shutil.move(model, tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="which is not there"):
        CAT.from_pretrained(copy)
    moved = CAT.from_pretrained(copy, backbone=tmp_path / "moved")
    moved.save_pretrained(copy)
    assert (copy / "backbone").is_dir() and not (copy / "tokenizer").exists()


def test_folders_that_are_not_a_cats_are_not_replaced(cat, tmp_path):
    (tmp_path / "backbone").mkdir()
    (tmp_path / "backbone/mine").write_text("mine")
    with pytest.raises(FileExistsError, match="is not replaced"):
        cat.save_pretrained(tmp_path)
    assert tree(tmp_path) == {"backbone/mine": b"mine"}


def test_a_run_never_removes_the_model_it_starts_from(tmp_path):
    tiny.model().save_pretrained(tmp_path / "model")
    before = tree(tmp_path / "model")
    (tmp_path / "model.settings.json").write_text("{}")  # even if a run was here
    with pytest.raises(FileExistsError, match="would put its own model"):
        assert Run("sentiment", str(tmp_path / "model"), folder=tmp_path).backbone
    assert tree(tmp_path / "model") == before


def test_equal_cats_are_equal_files(cat, saved, tmp_path):
    """Whatever the tokenizer was used for before."""
    cat.tokenizer(TEXTS["test"], truncation=True, max_length=9, padding=True)
    assert tree(cat.save_pretrained(tmp_path / "again")) == tree(saved)


def test_files_are_as_readable_as_the_umask_says(saved):
    for path in saved.rglob("*"):
        wanted = (0o777 if path.is_dir() else 0o666) & ~MASK
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


# --- silently another F ---

CONFIG = {"hidden_act": "relu", "layer_norm_eps": 0.1, "num_attention_heads": 4}
SAVED = {"max_length": 7, "measure": "sm", "autocast": "bfloat16", "files": {}, "texts": 2}


@pytest.mark.parametrize("field, value", CONFIG.items())
def test_another_configuration_is_refused(cat, copy, field, value):
    edit(copy / "backbone/config.json", **{field: value})
    with pytest.raises(ValueError, match="missing or was changed"):
        CAT.from_pretrained(copy)
    with pytest.raises(ValueError, match=f"{field} is {value!r} and was"):  # and where F is apart
        CAT.from_pretrained(cat.save_pretrained(copy.with_name("c")), backbone=copy / "backbone")


@pytest.mark.parametrize("field, value", SAVED.items())
def test_other_settings_are_refused(copy, field, value):
    edit(copy / "cat.json", **{field: value})
    with pytest.raises(ValueError, match="settings are not those it was saved with"):
        CAT.from_pretrained(copy)


@pytest.mark.parametrize("format", ["cats.CAT/2", "cats.CAT/3"])
def test_older_folders_load_and_must_name_their_files(cat, copy, format):
    path = copy / "cat.json"
    old = json.loads(path.read_text("utf-8"))
    old["backbone"] = {
        "where": "backbone",
        "dtype": "float32",
        "fingerprint": cat.backbone.weights,
    }
    path.write_text(json.dumps(old | {"format": format}))
    assert (CAT.from_pretrained(copy).thresholds(0.3) == cat.thresholds(0.3)).all()
    for files in ({}, {name: one for name, one in old["files"].items() if "token" not in name}):
        path.write_text(json.dumps(old | {"format": format, "files": files}))
        with pytest.raises(ValueError, match="names no hash"):
            CAT.from_pretrained(copy)


def test_a_file_beside_the_tokenizer_is_refused(copy):
    (copy / "backbone/added_tokens.json").write_text('{"plot": 7}')
    with pytest.raises(ValueError, match="is not part of this CAT"):
        CAT.from_pretrained(copy)


def test_a_run_notices_another_tokenizer_and_another_configuration(tmp_path):
    folder = tmp_path / "tuned"
    tiny.save(folder)

    def made():
        return tiny.run(folder, tmp_path / "run", fine_tuned=True).table("validation").sha256

    first = made()
    assert made() == first
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"Lowercase"', '"NFC"'))
    second = made()
    edit(folder / "config.json", layer_norm_eps=0.5)
    assert len({first, second, made()}) == 3


def test_emptied_and_cut_steps_are_made_again(tmp_path):
    tiny.save(tmp_path / "base")

    def made():
        run = tiny.run(
            tmp_path / "base", tmp_path / "run", training={"epochs": 1, "batch_size": 21}
        )
        return run.table("validation").sha256

    first, base = made(), tmp_path / "run"
    names = ("model/config.json", "model/model.safetensors", "model/tokenizer.json")
    names += ("paper/heads.safetensors", "paper/meta.settings.json", "paper/validation.safetensors")
    names += ("states/tune/plan.json", "states/tune/00000.safetensors", "model.files.json")
    for i, name in enumerate(names):
        whole = (base / name).read_bytes()
        (base / name).write_bytes(whole[: len(whole) // 2 * (i % 2)])  # emptied, cut, emptied …
        if name.startswith("states"):
            (base / "paper/heads.safetensors").unlink()  # so that it is read
        assert made() == first, name


# --- silently other inputs ---


def test_a_model_without_tokenizer_is_refused(tmp_path):
    tiny.model().save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        CAT.fit(tmp_path, TEXTS["tuning"], TEXTS["calibration"])
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="give its tokenizer"):
        CAT.fit(tiny.model(), TEXTS["tuning"], TEXTS["calibration"])
    demo.tokenizer().save_pretrained(tmp_path / "tokens")
    assert tiny.fit(tokenizer=tmp_path / "tokens").predict(TEXTS["test"])


def test_inputs_that_are_no_list_of_texts_say_so(cat):
    import datasets
    import pandas as pd

    rows = {"text": TEXTS["test"], "label": [0] * 24}
    for bad, message in (
        (pd.DataFrame(rows), "columns text, label"),
        (datasets.Dataset.from_dict(rows), "columns text, label"),
        ({"text": "a"}, "put it in a list"),
        (b"bytes", "put it in a list"),
        (3, "not 3"),
        ([{"txt": "a"}], "has 'txt'"),
        ([{"text": "a", "text_pair": 3}], "number 0"),
        ((one for one in ["a", 3]), "number 1 is 3"),
        (pd.Series(["a", None]), "number 1"),
    ):
        with pytest.raises(TypeError, match=message):
            cat.predict(bad)


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, True, "large", None])
def test_batch_sizes(cat, batch_size):
    with pytest.raises(ValueError, match="whole number of at least 1"):
        cat.predict(TEXTS["test"], batch_size=batch_size)


WRONG = [
    ({"labels": [0] * 39}, "40 tuning texts and 39 labels"),
    ({"labels": [0] * 39 + [None]}, "label 39 is None"),
    ({"labels": ["good"] * 39 + ["god"]}, "F knows bad, good"),
    ({"labels": [0.5] * 40}, "class numbers from 0 to 1"),
    ({"max_length": 0}, "at least 5, not 0"),
    ({"autocast": "fp16"}, "'bfloat16', 'float16' or None, not 'fp16'"),
]


@pytest.mark.parametrize("options, message", WRONG, ids=str)
def test_wrong_options_of_fit(options, message):
    recipe = "paper" if "labels" in options else "distilled"
    with pytest.raises(ValueError, match=message):
        tiny.fit(**options, recipe=recipe)


def test_labels_by_name(cat):
    names = [("bad", "good")[i % 2] for i in range(40)]
    by_name, by_number = (
        tiny.fit(labels=labels, recipe="paper") for labels in (names, np.arange(40) % 2)
    )
    assert torch.equal(by_name.heads.w_p, by_number.heads.w_p)


def test_repeated_calibration_texts_are_said_where_they_are_given():
    given = TEXTS["calibration"][:30] + TEXTS["calibration"][:10]
    options = {"tokenizer": demo.tokenizer()} | tiny.QUICK
    with pytest.warns(UserWarning, match="10 of 40 calibration texts are repeats") as caught:
        CAT.fit(tiny.model(), TEXTS["tuning"], given, **options)
    assert caught[0].filename == __file__
    with pytest.raises(ValueError, match="all 9 calibration texts are the same"):
        CAT.fit(tiny.model(), TEXTS["tuning"], ["a"] * 9, **options)


def test_exit_layers_must_be_a_list(cat):
    for bad in (2, "2"):
        with pytest.raises(TypeError, match="must be a list of layers among 1 … 2"):
            cat.predict(TEXTS["test"], exit_layers=bad)


def test_a_model_put_back_in_training_answers_as_before(cat):
    before = cat.predict(TEXTS["test"], 0.3)
    cat.backbone.model.train()
    np.testing.assert_array_equal(cat.predict(TEXTS["test"], 0.3).probabilities, before[3])
    cat.backbone.model.bert.encoder.train()
    np.testing.assert_array_equal(cat.predict(TEXTS["test"], 0.3).probabilities, before[3])


def test_a_nan_of_f_names_the_input():
    """The embedding of one word is not a number: its text is named, wherever it was batched."""
    model, tokens = tiny.model(), demo.tokenizer()
    cat = tiny.fit(model)
    word = tokens.get_vocab()["zebra" if "zebra" in tokens.get_vocab() else "treaty"]
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[word] = torch.nan
    given = TEXTS["test"][:5] + ["The treaty was superb and long, really."] + TEXTS["test"][5:]
    for given_as in (given, iter(given)):
        with pytest.raises(ValueError, match="number 5, 'The treaty was superb"):
            cat.predict(given_as, 0.5)
    with pytest.raises(ValueError, match="number 40, 'The treaty"):
        CAT.fit(
            model,
            TEXTS["tuning"],
            TEXTS["calibration"] + ["The treaty was dull"],
            tokenizer=tokens,
            **tiny.QUICK,
        )


# --- strangers ---

PATHS = ["/etc/hostname", "../copy/cat.json", "backbone/../../x", "a\\b", "c:x", ".", ""]


@pytest.mark.parametrize("name", PATHS)
def test_a_cat_names_no_file_outside_of_its_folder(copy, name):
    saved = json.loads((copy / "cat.json").read_text("utf-8"))
    files = saved["files"] | {name: "0" * 64}
    edit(copy / "cat.json", format="cats.CAT/3", files=files)  # where no digest would notice
    with pytest.raises(ValueError, match="outside of its folder|is missing or was changed"):
        CAT.from_pretrained(copy)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_is_no_file_is_not_opened(copy, kind):
    path = copy / "heads.safetensors"
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(ValueError, match="missing or was changed"):
        CAT.from_pretrained(copy)


def test_code_that_comes_with_a_model_is_never_run(saved, tmp_path, monkeypatch):
    """Neither asked about nor run, also where somebody would say yes."""
    folder = shutil.copytree(saved / "backbone", tmp_path / "model")
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    (folder / "mine.py").write_text(code)
    auto = {"AutoConfig": "mine.C", "AutoModelForSequenceClassification": "mine.M"}
    edit(folder / "config.json", auto_map=auto, model_type="mine")
    tokens = {"auto_map": {"AutoTokenizer": ["mine.T", None]}, "tokenizer_class": "T"}
    edit(folder / "tokenizer_config.json", **tokens)
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    with pytest.raises(ValueError, match="no model could be loaded"):
        CAT.fit(folder, TEXTS["tuning"], TEXTS["calibration"])
    try:
        load_tokenizer(folder)
    except ValueError:
        pass
    assert not (tmp_path / "ran").exists()


def test_names_reach_no_shell_unquoted():
    """A model called x`touch INJECTED` once did; {params.launch} is made with shlex.quote."""
    text = (ROOT / "Snakefile").read_text()
    commands = re.findall(r"^EXECUTE = \((.*?)^\)|shell:\n(.*?)\n\n", text, flags=re.S | re.M)
    fields = set(re.findall(r"\{([\w.\[\]:]+)\}", str(commands)))
    assert len(fields) > 5
    assert {one for one in fields if not one.endswith(":q")} == {"params.launch", "threads"}


@pytest.mark.parametrize("cut", [0, 1, 60, -2])
def test_a_cut_cat_json_says_so(copy, cut):
    path = copy / "cat.json"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match="cat.json is damaged"):
        CAT.from_pretrained(copy)


def test_no_warning_is_made_by_loading(saved):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CAT.from_pretrained(saved)


# --- short versions of the soak ---


def test_damaged_files_are_refused_or_the_same():
    found = soak.fuzz(120)
    assert sum(found.values()) == 120
    assert {kind for name, kind in found if name != "table"} <= {"refused", "the same"}


def test_a_killed_save_leaves_a_whole_cat():
    counts = Counter()
    soak.saves(5, random.Random(0), counts, "save")
    assert counts["save", "new"] + counts["save", "old"] == 5


def test_threads_and_batches_change_nothing():
    assert soak.threads(4, 3)["calls"] == 12 and soak.alone(40)


def test_memory_is_flat_over_a_stream():
    assert soak.stream(6_000)["texts"] == 6_000
