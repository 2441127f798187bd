"""What a notebook found, read to the reader: notebooks/readings/NN.md, filled from its facts.

    reading.show("22_consistency")              # the closing cell of a notebook
    reading.show("03_early_heads", run.name)    # of a stage, for one run

A reading is Markdown with fields such as `{layers:.1f}`. It opens with a table (claim, paper, here,
holds) and goes on for at most 80 words. The fields come from `cats.paper.facts`, which reads the
numbers that the notebook has just saved. True and False are written yes and no; a line with a field
that is None is left out.
"""

import math
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from IPython.display import Markdown

from cats.paper import style
from cats.paper.facts import facts
from cats.paper.places import FIGURES, ROOT

READINGS = ROOT / "notebooks" / "readings"
HEAD = "| claim | paper | here | holds |"
WORDS = 80  # a reading has at most so many after its table


class _Fields(string.Formatter):
    """Fields filled strictly: a number that is none is an error, a truth is a word."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[Any, Any]) -> Any:
        if key not in kwargs:
            raise KeyError(f"the reading asks for {key}; its facts are {', '.join(sorted(kwargs))}")
        return kwargs[key]

    def format_field(self, value: Any, form: str) -> str:
        if isinstance(value, float) and math.isnan(value):
            raise ValueError("a fact of this reading is not a number: leave it out with None")
        if isinstance(value, (bool, np.bool_)):
            return "yes" if value else "no"
        return super().format_field(value, form)


def fields(text: str) -> set[str]:
    """The names of the fields of a text."""
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def fill(text: str, found: Mapping[str, Any]) -> str:
    """A text with its fields filled, without the lines that have nothing to say; per cent signs
    stand as in the text around them, apart from their number.

    >>> fill("runs {share:.0%} of {layers}\\nholds: {kept}\\nof {more}", dict(share=0.3, layers=12,
    ... kept=True, more=None))
    'runs 30 % of 12\\nholds: yes'
    """
    lines = [
        line
        for line in text.splitlines()
        if not any(found.get(name, "") is None for name in fields(line))
    ]
    return re.sub(r"(?<=\d)%", " %", _Fields().vformat("\n".join(lines), (), found))


def path(notebook: str) -> Path:
    """Where a notebook's reading is: by its number."""
    return READINGS / f"{notebook[:2]}.md"


def render(notebook: str, run: str = "", folder: Path = FIGURES, **more: Any) -> str:
    """A notebook's reading as Markdown.

    run     for a stage: the run whose files are read
    folder  where its results are
    more    facts that are in no file
    """
    return fill(path(notebook).read_text().rstrip(), facts(notebook, run, folder, **more))


def show(notebook: str, run: str = "", **more: Any) -> Markdown:
    """Save a notebook's reading beside its results, and return it to look at."""
    name = f"{notebook}_reading" + (f"-{run}" if run else "")
    return style.save_reading(name, render(notebook, run, **more))


def words(text: str) -> int:
    """How many words a reading has after its table.

    >>> words("| claim |\\n|---|\\n| one |\\n\\nTwo words, ε = 0.05.")
    5
    """
    after = [line for line in text.splitlines() if not line.startswith("|")]
    return len(re.findall(r"\S+", "\n".join(after)))
