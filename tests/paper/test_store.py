"""The shipped tables: loading checks what the manifest says, a run is added whole, and every file
in data/tables is sound.
"""

import json

import numpy as np
import pytest
import tiny

import cats
from cats import ScoreTable
from cats._io import load_module, module_digest, sha256, write_json
from cats.model.exits import Heads, Meta, check_pair
from cats.paper import store
from cats.paper.places import DATA
from cats.train.run import Run

SIZES = {"train": 120, "validation": 40, "test": 30}
LAYERS = {"shallow": 4, "deep": 6}
MADE = [
    ("own_task", "deep"),
    ("imdb", "deep"),
    ("stsb", "deep"),
    ("ag_news", "shallow"),
    ("vitaminc", "shallow"),
]


@pytest.fixture
def folder(tmp_path):
    """Small real files of five pairs, entered in a manifest in no particular order."""
    entries = {}
    for i, (task, backbone) in enumerate(MADE):
        for split in ("validation", "test"):
            name = f"{task}-{backbone}-{split}.safetensors"
            cats.Synthetic(layers=LAYERS[backbone]).table(20, seed=i).save(tmp_path / name)
            about = {"task": task, "backbone": backbone, "what": split, "layers": LAYERS[backbone]}
            entries[name] = about | {"sha256": sha256(tmp_path / name)}
    write_json(tmp_path / "manifest.json", entries)
    return tmp_path


# --- loading ---


def test_a_table_comes_back(folder):
    for i, (task, backbone) in enumerate(MADE):
        table = store.table(task, backbone, "test", folder)
        assert table.sha256 == cats.Synthetic(layers=LAYERS[backbone]).table(20, seed=i).sha256


def test_pairs_follow_the_papers_order_of_tasks(folder):
    deep = [("imdb", "deep"), ("stsb", "deep"), ("own_task", "deep")]
    shallow = [("vitaminc", "shallow"), ("ag_news", "shallow")]
    assert store.pairs(folder) == deep + shallow


def test_the_main_figures_come_from_one_backbone(folder):
    """The one that is wanted, or one of MAIN, or the deepest there is; not the first by name."""
    assert [store.main(wanted, folder) for wanted in ("shallow", "deep", "absent")] == [
        "shallow",
        "deep",
        "deep",
    ]
    assert list(store.tables("test", "absent", folder)) == ["imdb", "stsb", "own_task"]
    assert store.tables("test", "shallow", folder)["ag_news"].n_layers == 4
    entries = store.manifest(folder)
    write_json(
        folder / "manifest.json",
        entries
        | {"a": {"task": "imdb", "backbone": "albert-xlarge-v2", "what": "test", "layers": 5}},
    )
    assert store.main("absent", folder) == "albert-xlarge-v2"


def test_a_changed_byte_is_refused(folder):
    file = folder / "imdb-deep-test.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        ValueError, match="imdb-deep-test.safetensors is not the file its manifest names"
    ):
        store.table("imdb", "deep", "test", folder)
    assert len(store.table("imdb", "deep", "validation", folder)) == 20  # the others still load


def test_a_whole_table_that_is_not_the_named_one_is_refused(folder):
    """Its own hash is right, so only the manifest can tell."""
    (folder / "imdb-deep-test.safetensors").write_bytes(
        (folder / "stsb-deep-test.safetensors").read_bytes()
    )
    assert ScoreTable.load(folder / "imdb-deep-test.safetensors")
    with pytest.raises(ValueError, match="check it out again, or make it anew"):
        store.table("imdb", "deep", "test", folder)


def test_a_missing_file_is_refused(folder):
    (folder / "stsb-deep-test.safetensors").unlink()
    with pytest.raises(
        ValueError, match="stsb-deep-test.safetensors is not the file its manifest names"
    ):
        store.table("stsb", "deep", "test", folder)


@pytest.mark.parametrize(
    "task, backbone, what",
    [("imdb", "shallow", "test"), ("snli", "deep", "test"), ("imdb", "deep", "train")],
)
def test_what_is_not_there_is_refused_with_what_is(folder, task, backbone, what):
    with pytest.raises(
        FileNotFoundError,
        match=f"no {what} of {task} with {backbone} is shipped for .*; there are .*stsb-deep-test",
    ):
        store.path(task, backbone, what, folder)


def test_a_file_that_no_manifest_names_is_not_loaded(folder):
    (folder / "snli-deep-test.safetensors").write_bytes(
        (folder / "stsb-deep-test.safetensors").read_bytes()
    )
    with pytest.raises(FileNotFoundError, match="no test of snli"):
        store.table("snli", "deep", "test", folder)


def test_an_empty_folder_has_no_pairs(tmp_path):
    assert store.manifest(tmp_path) == {} and store.pairs(tmp_path) == []
    with pytest.raises(FileNotFoundError, match="no ScoreTables"):
        store.tables("test", folder=tmp_path)
    with pytest.raises(FileNotFoundError, match="there are none"):
        store.table("imdb", "deep", "test", tmp_path)


# --- adding a run ---


def test_a_run_is_added_whole_and_beside_the_others(folder, tmp_path_factory):
    before = store.manifest(folder)
    quick = {"training": {"epochs": 1}, **tiny.QUICK}
    run = Run("similarity", folder=tmp_path_factory.mktemp("run"), limit=SIZES, **quick)
    assert store.add(run, folder) == folder
    entries = store.manifest(folder)
    new = {name: entry for name, entry in entries.items() if name not in before}
    assert {name: entries[name] for name in before} == before
    assert set(new) == {
        f"similarity-demo-{what}.safetensors" for what in ("validation", "test", "heads", "meta")
    }
    for name, entry in new.items():
        file = folder / name
        assert file.read_bytes() == (run.home / f"{entry['what']}.safetensors").read_bytes()
        assert entry["sha256"] == sha256(file) and entry["bytes"] == file.stat().st_size
        assert (entry["task"], entry["backbone"], entry["seed"], entry["layers"]) == (
            "similarity",
            "demo",
            0,
            12,
        )
        assert ("inputs" in entry) == (
            entry["what"] in ("validation", "test")
        )  # "meta" is also a part of the training data
    assert {p.name for p in folder.iterdir()} == {
        *entries,
        "manifest.json",
        ".manifest.lock",
    }  # nothing half-written is left
    # what comes back is what the run has
    assert ("similarity", "demo") in store.pairs(folder)
    for split in ("validation", "test"):
        table, entry = (
            store.table("similarity", "demo", split, folder),
            new[f"similarity-demo-{split}.safetensors"],
        )
        assert table.sha256 == run.table(split).sha256 and table.metadata["split"] == split
        assert (
            entry["inputs"] == len(table) == SIZES[split]
            and entry["data"] == table.metadata["data"]
        )
    for kind, what, module in ((Heads, "heads", run.heads), (Meta, "meta", run.meta)):
        back, _ = load_module(kind, store.path("similarity", "demo", what, folder))
        assert all(
            (back.state_dict()[name] == tensor).all()
            for name, tensor in module.state_dict().items()
        )
    # adding it again changes nothing, and what another run enters meanwhile is kept
    late = {"late.safetensors": {"task": "late", "backbone": "other"}}
    table = run.table
    run.table = lambda split: write_json(folder / "manifest.json", entries | late) or table(split)
    store.add(run, folder)
    assert store.manifest(folder) == entries | late
    write_json(folder / "manifest.json", entries)
    run.table = table
    content = (folder / "manifest.json").read_bytes()
    store.add(run, folder)
    assert (folder / "manifest.json").read_bytes() == content


def test_only_tables_are_kept_of_another_seed_and_where_heads_are_large(
    tmp_path, tmp_path_factory, monkeypatch
):
    model = tiny.save(tmp_path_factory.mktemp("model"))
    first, second = (
        tiny.run(model, tmp_path_factory.mktemp("run"), fine_tuned=True, seed=seed)
        for seed in (0, 1)
    )
    what = lambda: sorted(entry["what"] for entry in store.manifest(tmp_path).values())
    tables = ["test", "validation"]
    store.add(second, tmp_path)
    assert what() == tables and store.seeds(
        first.task.name, first.backbone_name, folder=tmp_path
    ) == [1]
    store.add(first, tmp_path)
    assert what() == sorted([*tables, *store.KEPT])
    monkeypatch.setattr(store, "LARGEST", 1_000)
    store.add(first, tmp_path)  # heads of the run before it are of another F
    assert what() == sorted([*tables, *tables])
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {*store.manifest(tmp_path)}


# --- why float32 ---


def test_half_precision_would_move_thresholds_and_exits():
    """What the module says: confident scores tie in half precision."""
    table = cats.Synthetic().table(4000)
    calibration, test = np.arange(4000) < 3000, np.arange(4000) >= 3000

    def exits(dtype):
        scores = table.scores("meta").astype(dtype).astype(float)
        t = cats.calibrate(
            scores[calibration], table.consistent[calibration], 0.02, method="first_exit"
        )
        return t, cats.exit_layers(scores[test], t), scores

    (t, out, full), (t_single, out_single, _), (t_half, out_half, half) = (
        exits(float),
        exits(np.float32),
        exits(np.float16),
    )
    assert t_half[0] != t[0] and (out_half != out).any()
    assert (out_single == out).all() and np.abs(t_single - t).max() < 1e-7
    assert len(np.unique(half[half > 0.5])) < len(np.unique(full[full > 0.5])) / 4
    assert np.spacing(np.float16(0.5)) == pytest.approx(0.0005, rel=0.03)


# --- the files themselves: no reason to skip one ---

# The repository's own folder, whatever CATS_TABLES says.
TABLES = DATA / "tables"
ENTRIES, PAIRS = store.manifest(TABLES), store.pairs(TABLES)
of_pair = pytest.mark.parametrize("task, backbone", PAIRS, ids=["-".join(pair) for pair in PAIRS])


def test_the_folder_holds_what_the_manifest_names_and_little_of_it():
    files = {path.name for path in TABLES.glob("*") if not path.name.startswith(".")} - {
        "manifest.json"
    }
    assert files == set(ENTRIES)
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 90e6


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_a_shipped_file_is_the_one_named(name):
    entry, file = ENTRIES[name], TABLES / name
    recipe, seed = entry.get("recipe", "paper"), entry["seed"]
    expected = store.file_name(entry["task"], entry["backbone"], entry["what"], recipe, seed)
    assert name == expected and entry["what"] in store.KEPT
    assert sha256(file) == entry["sha256"] and file.stat().st_size == entry["bytes"]
    assert ("inputs" in entry) == ("data" in entry) == (entry["what"] in ("validation", "test"))


RECIPES = [
    (*pair, recipe) for recipe in ("paper", "distilled") for pair in store.pairs(TABLES, recipe)
]


@pytest.mark.parametrize("task, backbone, recipe", RECIPES, ids="-".join)
def test_a_pair_is_whole(task, backbone, recipe):
    assert {
        entry["what"]
        for entry in ENTRIES.values()
        if (entry["task"], entry["backbone"]) == (task, backbone)
        and entry.get("recipe", "paper") == recipe
    } in (set(store.KEPT), set(store.SPLITS))
    if store.file_name(task, backbone, "heads", recipe) not in ENTRIES:
        assert recipe != "paper"  # whose heads are small
        return
    heads, about = load_module(Heads, store.path(task, backbone, "heads", TABLES, recipe))
    meta, of_meta = load_module(Meta, store.path(task, backbone, "meta", TABLES, recipe))
    table = store.table(task, backbone, "test", TABLES, recipe)
    assert about["model"] == of_meta["model"] == table.metadata["model"]
    check_pair(heads, meta, module_digest(heads))
    if recipe != "paper":  # of one F: only heads and meta classifiers differ
        paper = store.table(task, backbone, "test", TABLES)
        np.testing.assert_array_equal(table.logits[:, -1], paper.logits[:, -1])


@of_pair
@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_shipped_table_is_sound(task, backbone, split):
    table, entry = (
        store.table(task, backbone, split, TABLES),
        ENTRIES[f"{task}-{backbone}-{split}.safetensors"],
    )
    about = table.metadata
    assert (about["task"], about["backbone"], about["split"], about["data"]) == (
        task,
        backbone,
        split,
        entry["data"],
    )
    assert 1_000 <= len(table) <= 10_000 and len(table) == entry["inputs"] == about["rows"][split]
    assert table.n_layers == entry["layers"] and table.labels is not None
    assert (
        table.logits.dtype == table.meta.dtype == np.float32
        and 0 <= table.meta.min()
        and table.meta.max() <= 1
    )
    # deeper layers say more often what F says
    consistency = table.consistent.mean(axis=0)
    third = len(consistency) // 3
    assert consistency[-third:].mean() > consistency[:third].mean()
    # only numbers are shipped: no text, no path of the machine that made them
    assert (
        "/" not in about["source"]
        and "/home" not in json.dumps(about)
        and "/work" not in json.dumps(about)
    )


@of_pair
def test_validation_and_test_are_other_data_seen_by_the_same_model(task, backbone):
    validation, test = (
        store.table(task, backbone, split, TABLES) for split in ("validation", "test")
    )
    assert validation.metadata["data"] != test.metadata["data"] and validation.sha256 != test.sha256
    same = ("model", "seed", "max_length", "rows", "training", "early", "meta")
    assert {key: validation.metadata[key] for key in same} == {
        key: test.metadata[key] for key in same
    }
    assert validation.tau == test.tau


def test_a_run_goes_on_from_files_of_the_first_version(tmp_path):
    """What Python calls head_options and meta_options is `early` and `meta` in every file."""
    model = tiny.save(tmp_path / "model")
    run = tiny.run(model, tmp_path / "run", fine_tuned=True)
    about = run.table("test").metadata
    shipped = store.table("stsb", "bge-small-en-v1.5", "test", TABLES).metadata
    assert set(about) == set(shipped)
    assert (about["early"], about["meta"]) == (run.head_options, run.meta_options)
    for what, name in (("heads", "early"), ("meta", "meta")):
        settings = json.loads((run.home / f"{what}.settings.json").read_text())
        assert settings[name] == {"epochs": 1} and not any("options" in key for key in settings)


def test_backbones_of_a_task_saw_the_same_inputs():
    """One task, one seed: the split does not depend on the model, so pairs can be compared input by
    input.
    """
    data = {}
    for entry in ENTRIES.values():
        if "data" in entry:
            key = entry["task"], entry["seed"], entry["what"]
            data.setdefault(key, set()).add(entry["data"])
    assert all(len(found) == 1 for found in data.values())
