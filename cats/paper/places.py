"""Where this checkout keeps its files: the only place that knows."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA, BUILD = ROOT / "data", ROOT / "build"
FIGURES = Path(os.environ.get("CATS_FIGURES", ROOT / "figures"))
