"""Where things are, how files are written (whole or not at all), and the provenance every result
carries.
"""

import hashlib
import json
import os
import platform
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the repository; installs are editable
DATA, BUILD = ROOT / "data", ROOT / "build"
FIGURES = Path(os.environ.get("CATS_FIGURES", ROOT / "figures"))


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
