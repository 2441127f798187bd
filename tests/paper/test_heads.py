"""Recipes side by side: numbers against the obvious way of getting them."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

import cats
from cats.paper import heads
from cats.stats.trials import oracle_exits, settled_exits


@pytest.fixture(scope="module")
def tables():
    plain = cats.Synthetic().table(600, seed=1)
    better = cats.ScoreTable(plain.logits, np.sqrt(plain.meta), plain.labels)
    return {("A", "paper"): plain, ("A", "distilled"): better}


def test_settled_waits_until_no_layer_changes_its_mind():
    consistent = np.array([[0, 1, 1], [1, 0, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1]], bool)
    assert settled_exits(consistent, 0.01).tolist() == [2, 3, 4, 4, 1]
    assert oracle_exits(consistent, 0.01).tolist() == [2, 1, 1, 4, 1]
    assert settled_exits(consistent, 0.2).tolist() == [2, 3, 1, 4, 1]  # one of five may be wrong
    random = np.random.default_rng(0).random((200, 7)) < 0.8
    slow = [next((k + 1 for k in range(7) if row[k:].all()), 8) for row in random]
    assert settled_exits(random, 0.001).tolist() == slow
    assert (settled_exits(random, 0.001) >= oracle_exits(random, 0.001)).all()


def test_layers_are_those_of_evaluate_and_the_oracle_s_are_of_the_last_recipe(tables):
    used = heads.layers(tables, [0.1, 0.2], trials=3).set_index(["recipe", "epsilon"])
    for (_, recipe), table in tables.items():
        frame = cats.evaluate(table, "first_exit", "meta", [0.1, 0.2], 3)
        expected = frame[frame["epsilon"] == 0.1]["layers"].mean()
        assert used.layers[recipe, 0.1] == pytest.approx(expected)
    last = tables["A", "distilled"].consistent
    assert used.layers["oracle", 0.2] == oracle_exits(last, 0.2).mean()
    assert used.layers["oracle", 0.1] <= used.layers["settled", 0.1]
    saved = heads.saved(used.reset_index())
    share = 1 - used.layers["distilled", 0.1] / used.layers["paper", 0.1]
    assert saved.loc["A", 0.1] == pytest.approx(share)


def test_every_recipe_is_drawn_also_one_without_a_colour(tables):
    more = tables | {("A", "mine"): tables["A", "paper"]}
    used = heads.layers(more, [0.1, 0.2], trials=2)
    figure = heads.draw(heads.by_layer(more), used)
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert labels == {"paper", "distilled", "mine", "settled", "oracle"}
    plt.close(figure)
