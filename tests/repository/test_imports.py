"""The rule of the rooms: stats ← model ← train ← runtime; paper sees all and nobody sees paper. And
what is imported is declared.
"""

import ast
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("stats", "model", "train", "runtime", "paper")  # each sees itself and those before it
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def imports(source: str) -> set[str]:
    """The modules a program imports anywhere, those for type checkers included."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute here"
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return found


def cells(path: Path) -> str:
    """The code of a notebook."""
    return "\n".join(
        "".join(cell["source"])
        for cell in json.loads(path.read_text())["cells"]
        if cell["cell_type"] == "code"
    )


@cache
def modules() -> dict[str, set[str]]:
    """What each file of the package imports, by its path in there."""
    package = ROOT / "cats"
    return {
        path.relative_to(package).as_posix(): imports(path.read_text())
        for path in sorted(package.rglob("*.py"))
    }


def breaks(file: str, imported: set[str]) -> set[str]:
    """The imports of a file that the rule forbids."""
    room = Path(file).parts[0]
    seen = ROOMS[: ROOMS.index(room) + 1] if room in ROOMS else ()
    if file == "__init__.py":
        seen = ("stats", "runtime")  # the public names; a test below asks when they are loaded
    hidden = {f"cats.{other}" for other in ROOMS if other not in seen}
    return {name for name in imported if ".".join(name.split(".")[:2]) in hidden}


def test_the_rule_of_the_rooms():
    found = {file: breaks(file, imported) for file, imported in modules().items()}
    assert {file: names for file, names in found.items() if names} == {}
    assert {file.split("/")[0] for file in modules() if "/" in file} == set(ROOMS)


def test_the_rule_is_one_that_can_be_broken():
    assert breaks("stats/x.py", imports("from cats.model import exits"))
    assert breaks("_io.py", {"cats.stats.table"}) and breaks("model/x.py", {"cats.train"})
    assert breaks("runtime/x.py", imports("def f():\n    from cats.paper.places import ROOT"))
    assert not breaks("train/x.py", {"cats._io", "cats.stats", "cats.model.exits", "cats.train"})


def test_one_file_knows_where_the_checkout_is():
    knows = re.compile(r"__file__.*(\.parents\[|parent\.parent)|\.cwd\(\)|environ.*CATS_")
    found = {path.name for path in (ROOT / "cats").rglob("*.py") if knows.search(path.read_text())}
    assert found == {"places.py"}


@pytest.mark.parametrize("wanted", ["cats", "cats.stats.validity", "cats.paper.style"])
def test_statistics_and_figures_do_not_wait_for_torch(wanted):
    ask = f"import sys, {wanted}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def declared(*extras: str) -> set[str]:
    """The packages that an installation with these extras asks for."""
    wanted = PROJECT["dependencies"] + sum(
        (PROJECT["optional-dependencies"][extra] for extra in extras), []
    )
    return {name.lower().replace("_", "-") for name in wanted}


def undeclared(imported: set[str], *extras: str, own=("cats",)) -> set[str]:
    """Top-level modules of other packages, which an installation with these extras may lack."""
    tops = {name.split(".")[0] for name in imported} - set(sys.stdlib_module_names) - set(own)
    homes = packages_distributions()
    known = declared(*extras)
    return {
        top
        for top in tops
        if not known & {name.lower().replace("_", "-") for name in homes.get(top, [top])}
    }


def test_everything_imported_is_declared():
    core = set().union(*(found for file, found in modules().items() if "paper/" not in file))
    paper = set().union(*modules().values())
    notebooks = imports("\n".join(cells(path) for path in (ROOT / "notebooks").glob("*.ipynb")))
    tests = [path for path in (ROOT / "tests").rglob("*.py")]
    asked = set().union(*(imports(path.read_text()) for path in tests))
    assert undeclared(core) == set()
    assert undeclared(paper | notebooks, "paper", "onnx", "site") == set()
    helpers = {path.stem for path in (ROOT / "tests").glob("*.py")}
    assert undeclared(asked, "paper", "onnx", "test", "browser", own=("cats", *helpers)) == set()
    assert undeclared({"seaborn.axisgrid", "yaml", "json"}) == {"seaborn", "yaml"}  # extras
