"""Where this checkout keeps its files: the only place that knows."""

import os
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA, BUILD = ROOT / "data", ROOT / "build"
COMMITTED = ROOT / "figures"  # made by the batch, which says so in CATS_FIGURES
TABLES = Path(os.environ.get("CATS_TABLES", DATA / "tables"))  # or figures of your own tables
FIGURES = Path(os.environ.get("CATS_FIGURES", BUILD / "figures"))  # by hand: replaces nothing


def shown(path: str | Path) -> str:
    """A path as a reader of the repository would write it."""
    path = Path(path)
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def results(pattern: str) -> list[Path]:
    """Results by name, in order: those of this run, or the committed ones where it has none."""
    return sorted(FIGURES.glob(pattern)) or sorted(COMMITTED.glob(pattern))


@cache
def announce(folder: Path) -> None:
    """Say once where results go that are not the batch's."""
    if "CATS_FIGURES" not in os.environ:
        print(
            f"Results go to {shown(folder)}/. Those in figures/ are made by the batch: make figures"
        )
