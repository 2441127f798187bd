"""What a CAT is given, texts of many kinds, and what it answers."""

import operator
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

Row = tuple[str, ...]  # one input: a text, or two
KEYS = ("text", "text_pair")  # of an input that is a dict, as transformers' pipelines have it
WINDOW = 1024  # inputs of a stream that are in memory together
# tokens of a batch where its size is left to us: on a CPU more gains nothing
TOKENS, MOST = {"cpu": 4096}, 256
SHOWN = 8  # rows of a repr


def row_of(item: Any, i: int) -> Row:
    """One input as a tuple of one or two texts."""
    if isinstance(item, str):
        return (item,)
    if isinstance(item, Mapping):
        unknown = [key for key in item if key not in KEYS]
        if unknown or "text" not in item:
            raise TypeError(
                f"an input that is a dict has the keys 'text' and perhaps 'text_pair'; number {i}"
                f" has {', '.join(map(repr, item))}"
            )
        row = tuple(item[key] for key in KEYS if item.get(key) is not None)
    else:
        row = tuple(item) if isinstance(item, tuple | list | np.ndarray) else (item,)
    if not 1 <= len(row) <= 2 or not all(isinstance(text, str) for text in row):
        raise TypeError(
            "texts must all be strings, or all be pairs of strings (tuples, or dicts with 'text'"
            f" and 'text_pair'); number {i} is {item!r:.80}"
        )
    return row


def iterate(texts: Any) -> Iterator[Row]:
    """The inputs one by one, each checked: from a list, a generator, a column of a data set or
    frame, or an array. They must be of one kind.
    """
    if isinstance(texts, str | bytes):
        raise TypeError(
            "texts must be a list of strings (or of pairs), not one string: put it in a list"
        )
    if isinstance(texts, Mapping):
        raise TypeError("texts must be a list, not one dict: put it in a list")
    names = getattr(texts, "column_names", getattr(texts, "columns", None))
    if names is not None:
        raise TypeError(
            f"this is a table with the columns {', '.join(map(str, names))}: give the column that"
            " holds the texts, as table['text'], or for pairs zip(table['a'], table['b'])"
        )
    if not isinstance(texts, Iterable):
        raise TypeError(f"texts must be a list of strings (or of pairs), not {texts!r:.80}")
    kind = None
    for i, item in enumerate(texts):
        row = row_of(item, i)
        kind = kind or len(row)
        if len(row) != kind:
            raise TypeError(
                "texts must all be strings, or all be pairs of strings; number"
                f" {i} is {item!r:.80} after inputs of {kind}"
            )
        yield row


def rows_of(texts: Any) -> list[Row]:
    """All inputs, see `iterate`."""
    return list(iterate(texts))


def windows(texts: Any, size: int = WINDOW, *, cut: bool = False) -> Iterator[list[Row]]:
    """The inputs of a stream a few at a time; of what is in memory already all at once, but for
    `cut`.
    """
    rows = iterate(texts)
    if not (cut or isinstance(texts, Iterator)):
        yield list(rows)
        return
    while window := list(islice(rows, size)):
        yield window


def check_batch_size(batch_size: int | str) -> int | str:
    """A whole number of at least 1, or "auto"."""
    if batch_size == "auto":
        return batch_size
    try:
        found = operator.index(batch_size)  # type: ignore[arg-type]
    except TypeError:
        found = 0
    if found < 1 or isinstance(batch_size, bool):
        raise ValueError(
            f"batch_size must be a whole number of at least 1, or 'auto', not {batch_size!r}"
        )
    return found


def rows_together(batch_size: int | str, longest: int, device: str) -> int:
    """The batch size, or for "auto" as many of the longest inputs as suit the device."""
    if batch_size == "auto":
        return min(MOST, max(1, TOKENS.get(device, 16 * TOKENS["cpu"]) // max(1, longest)))
    return int(batch_size)


class Arrays(NamedTuple):
    """What a CAT says, in the order of the inputs."""

    predictions: np.ndarray  # (n,), a class number, or a number for regression
    exit_layers: np.ndarray  # (n,), 1 … l
    # (n,), the score with which an input left; 1 at the last layer, which is F itself
    confidences: np.ndarray
    # (n, C), softmax of the layer it left at; the outputs themselves for regression
    probabilities: np.ndarray


class Predictions(Arrays):
    """What a CAT says, in the order of the inputs; `names` are those of the classes."""

    names: dict[int, str] | None = None

    @classmethod
    def of(cls, arrays: Arrays, names: dict[int, str] | None) -> "Predictions":
        made = cls(*arrays)
        made.names = names
        return made

    @property
    def labels(self) -> np.ndarray | None:
        """The names of the predicted classes, (n,); None for regression."""
        if self.names is None:
            return None
        return np.array([self.names[int(one)] for one in self.predictions], dtype=object)

    def to_pandas(self) -> pd.DataFrame:
        """One row an input: label and its probability (or the number predicted), exit layer,
        confidence.
        """
        if self.names is None:
            columns: dict[str, Any] = {"prediction": self.predictions}
        else:
            top = self.probabilities[np.arange(len(self.predictions)), self.predictions]
            columns = {"label": self.labels, "probability": top}
        return pd.DataFrame(
            columns | {"exit_layer": self.exit_layers, "confidence": self.confidences}
        )

    def __repr__(self) -> str:
        n = len(self.predictions)
        if not n:
            return "Predictions of 0 inputs"
        rest = f"\n… and {n - SHOWN} more" if n > SHOWN else ""
        return (
            f"Predictions of {n} inputs, {self.exit_layers.mean():.2f} layers on average\n"
            f"{self.to_pandas().head(SHOWN).to_string(float_format='{:.3f}'.format)}{rest}"
        )
