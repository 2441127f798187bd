"""The cheap first step of a cascade: it learns what F says, whatever F never says."""

import numpy as np
import pytest

import cats
from cats.paper.cascades import Student
from cats.train import demo

TEXTS = demo.corpus("sentiment", "validation", 300, noise=0)["text"][:]


def says(rows):
    """An F of three classes that never says the second."""
    good = np.array(["not" in text.split() for text in rows])
    return 3.0 * np.eye(3)[np.where(good, 0, 2)]


def test_a_class_that_F_never_says_keeps_its_column():
    student = Student(TEXTS[:200], says(TEXTS[:200]))
    found = student.predict_proba(TEXTS[200:])
    assert found.shape == (100, 3) and (found[:, 1] == 0).all()
    np.testing.assert_allclose(found.sum(axis=1), 1)
    assert (found.argmax(axis=1) == says(TEXTS[200:]).argmax(axis=1)).mean() > 0.8
    assert 0 < student.macs(TEXTS) < 100
    cascade = cats.Cascade([student, says], [0.01, 1]).calibrate(TEXTS[:200])
    assert cascade.table(TEXTS[200:]).n_classes == 3


def test_an_F_of_one_class_is_said_and_the_cascade_goes_on():
    one = lambda rows: np.tile([1.0, 4.0], (len(rows), 1))
    with pytest.warns(UserWarning, match="class 1 of all 200 texts.*Train F for longer"):
        student = Student(TEXTS[:200], one(TEXTS[:200]))
    cascade = cats.Cascade([student, one], [0.0, 1]).calibrate(TEXTS[:200])
    out = cascade.predict(TEXTS[200:], 0.1)
    assert (out.exit_layers == 1).all() and (out.predictions == 1).all()
    assert student.macs(TEXTS) == 0
