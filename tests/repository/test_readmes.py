"""Both READMEs say what the committed numbers say, each of which is found here in another way."""

import re
from functools import cache

import headlines
import pytest
from batches import ROOT

from cats.paper import reading, summary
from cats.paper.facts import facts

READMES = {"README": "README.md", "figures": "figures/README.md"}
TEMPLATES = {"README": "summary", "figures": "found"}
FIELDS = sorted(
    {
        (name, field)
        for name, template in TEMPLATES.items()
        for field in reading.fields((reading.READINGS / f"{template}.md").read_text())
    }
)


@cache
def every():
    return headlines.every()


@cache
def found():
    return facts("found", folder=ROOT / "figures")


def missing(name, text):
    """The sentences that a README lacks."""
    said = " ".join(text.split())
    return [sentence for which, sentence in every() if which == name and sentence not in said]


@pytest.mark.parametrize("name", READMES)
def test_a_readme_says_what_the_figures_say(name):
    assert missing(name, (ROOT / READMES[name]).read_text()) == []


def test_the_readmes_are_in_step_with_the_figures():
    """Written by python -m cats.paper.summary, as the batch does at its end."""
    readme = (ROOT / "README.md").read_text()
    assert summary.readme(readme) == readme
    assert summary.page() == (ROOT / "figures/README.md").read_text()


def spoilt(value):
    """Another value of the same kind, as a wrong fact would give it."""
    if isinstance(value, str):
        return re.sub(r"\d", lambda digit: str((int(digit[0]) + 1) % 10), value, count=1) + "?"
    return type(value)(1.2 * value + 1)


def planted(field):
    """All facts, the one of a field wrong."""
    *path, last = re.findall(r"\w+", field)
    facts = inner = dict(found())
    for key in path:
        inner[key] = dict(inner[key])
        inner = inner[key]
    inner[last] = spoilt(inner[last])
    return facts


@pytest.mark.parametrize(("name", "field"), FIELDS, ids=lambda value: value)
def test_a_wrong_fact_is_caught(name, field):
    """Whichever number of a README is wrong, some sentence found without the facts is not there."""
    text = (reading.READINGS / f"{TEMPLATES[name]}.md").read_text().rstrip()
    assert missing(name, reading.fill(text, found())) == []
    assert missing(name, reading.fill(text, planted(field))) != []
