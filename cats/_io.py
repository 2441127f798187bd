"""Where things are, how files are written (whole or not at all), and the provenance every result
carries.
"""

import hashlib
import json
import os
import platform
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the repository; installs are editable
DATA, BUILD = ROOT / "data", ROOT / "build"
COMMITTED = ROOT / "figures"  # made by the batch, which says so in CATS_FIGURES
FIGURES = Path(os.environ.get("CATS_FIGURES", BUILD / "figures"))  # by hand: replaces nothing


@contextmanager
def writing(path):
    """A path beside `path` to write to; renamed to `path` at the end, gone if anything went wrong
    before.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(
        f".{os.getpid()}.{path.name}"
    )  # keeps the suffix, which writers read the format from
    try:
        yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def versions(*packages):
    """The versions a result was made with."""
    found = {name: version(name) for name in ("numpy", "scipy", "pandas", *packages)}
    return {"python": platform.python_version(), "cats": version("cats"), **found}


def write_json(path, content):
    """JSON with sorted keys, so that equal contents are equal files."""
    with writing(path) as aside:
        aside.write_text(json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def sha256(path):
    """The hash of a file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def shown(path):
    """A path as a reader of the repository would write it."""
    path = Path(path)
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def results(pattern):
    """Results by name, in order: those of this run, or the committed ones where it has none."""
    return sorted(FIGURES.glob(pattern)) or sorted(COMMITTED.glob(pattern))


@cache
def announce(folder):
    """Say once where results go that are not the batch's."""
    if "CATS_FIGURES" not in os.environ:
        print(
            f"Results go to {shown(folder)}/. Those in figures/ are made by the batch: make figures"
        )
