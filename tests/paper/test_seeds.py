"""What the seed changes, beside what the recipe changes; and nothing where there is one seed."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest

import cats
from cats._io import sha256, write_json
from cats.paper import facts, seeds, store


def shipped(folder, *files):
    """A folder of small tables, (task, recipe, seed) each, in a manifest."""
    entries = {}
    for i, (task, recipe, seed) in enumerate(files):
        name = store.file_name(task, "bge-small-en-v1.5", "test", recipe, seed)
        cats.Synthetic(layers=5).table(200, seed=i).save(folder / name)
        about = dict(task=task, backbone="bge-small-en-v1.5", recipe=recipe, seed=seed)
        entries[name] = about | dict(what="test", layers=5, sha256=sha256(folder / name))
    write_json(folder / "manifest.json", entries)
    return folder


def test_only_pairs_of_more_than_one_seed_are_compared(tmp_path):
    both = [("stsb", recipe, seed) for recipe in ("paper", "distilled") for seed in (0, 1, 2)]
    folder = shipped(tmp_path, *both, ("imdb", "paper", 0), ("ag_news", "paper", 0))
    found = seeds.tables(["paper", "distilled"], folder)
    assert list(found) == [("STS-B, bge-small", recipe, seed) for _, recipe, seed in both]
    assert len({table.sha256 for table in found.values()}) == 6
    assert store.pairs(folder) == [
        (task, "bge-small-en-v1.5") for task in ("imdb", "ag_news", "stsb")
    ]
    used = seeds.layers(found, [0.1, 0.2], trials=2).set_index(["recipe", "seed", "epsilon"])
    frame = cats.evaluate(found["STS-B, bge-small", "distilled", 1], "first_exit", "meta", [0.2], 2)
    assert used.layers["distilled", 1, 0.2] == pytest.approx(frame["layers"].mean())


def test_one_seed_says_nothing(tmp_path):
    folder = shipped(tmp_path, ("stsb", "paper", 0), ("stsb", "distilled", 0))
    assert seeds.tables(["paper", "distilled"], folder) == {}
    said = facts._seeds(facts.Files(tmp_path))
    assert set(said.values()) == {None}  # so the reading leaves the line out


FRAME = pd.DataFrame(
    [
        ("A", "paper", 0, 0.05, 0.951, 4.0),
        ("A", "paper", 1, 0.05, 0.949, 4.5),
        ("A", "distilled", 0, 0.05, 0.95, 3.0),
        ("A", "distilled", 1, 0.05, 0.95, 3.25),
        ("A", "paper", 0, 0.1, 0.9, 2.0),
        ("A", "paper", 1, 0.1, 0.9, 3.0),
        ("A", "distilled", 0, 0.1, 0.9, 2.0),
        ("A", "distilled", 1, 0.1, 0.9, 2.0),
        ("B", "paper", 0, 0.1, 0.9, 2.0),
        ("B", "paper", 1, 0.1, 0.9, 2.1),
    ],
    columns=["pair", "recipe", "seed", "epsilon", "consistency", "layers"],
)


def test_differences_one_can_check_by_eye(tmp_path):
    both = seeds.compared(FRAME)
    assert both.loc[("A", 0.05)].tolist() == [0.5, 4.25 - 3.125]
    assert both.loc[("A", 0.1)].tolist() == [1.0, 0.5]
    assert both["recipes"].isna().tolist() == [False, False, True]  # B has one recipe
    shown = seeds.shown(FRAME).set_index(["pair", "1 − ε"])
    assert shown.loc[("A", "95 %")].tolist() == [
        "4.00, 4.50",
        "3.00, 3.25",
        "0.50",
        "1.12",
        "94.9 to 95.1",
    ]
    assert shown.loc[("B", "90 %"), ["layers, distilled", "between recipes"]].tolist() == ["", ""]
    FRAME.to_csv(tmp_path / "42_heads_seeds.csv", index=False)
    said = facts._seeds(facts.Files(tmp_path))
    assert said == dict(seeds_range="0.50 to 1.00", seeds_beaten="1 of 2", seeds_clear=False)


def test_every_seed_is_a_mark():
    figure = seeds.draw(FRAME)
    first = figure.axes[0]
    marks = [one for one in first.collections if one.get_label() in ("paper", "distilled")]
    assert [len(one.get_offsets()) for one in marks] == [4, 4]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["paper", "distilled"]
    plt.close(figure)
