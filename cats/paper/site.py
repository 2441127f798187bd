"""One page with everything: figures/index.html, from the executed notebooks and what they left in
figures/.

    python -m cats.paper.site figures build/demo/*.ipynb

For every notebook: what it shows (its first cell), its pictures and tables, and its reading of the
result (its last output). A notebook that measures seconds is shown as the files of that folder have
it, reading included: they are the record of one named run. What the machine at hand measured is in
the folder's `here`, on a page of its own.
"""

import html
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import nbformat
from nbconvert.filters import markdown2html

from cats._io import writing
from cats.paper.captions import caption
from cats.paper.places import COMMITTED

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; color: #222 }
nav { columns: 2; font-size: .9rem }
section { border-top: 1px solid #ccc; margin-top: 2rem; overflow-x: auto }
img { max-width: min(100%, 42rem); display: block; margin: 1rem 0 } .wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .85rem }
td, th { padding: .15rem .6rem; text-align: left; border-bottom: 1px solid #eee;
  white-space: nowrap }
figcaption, footer { color: #666; font-size: .85rem }
"""

LETTERS = {
    r"\varepsilon": "ε",
    r"\delta": "δ",
    r"\tau": "τ",
    r"\infty": "∞",
    r"\le": "≤",
    r"\ge": "≥",
    r"\mid": "|",
    r"\cdot": "·",
    r"\lceil": "⌈",
    r"\rceil": "⌉",
}


def plain(text: str) -> str:
    """The notebooks' short formulas in plain letters: the page works without a network, so it has
    no MathJax.
    """

    def letters(found: re.Match[str]) -> str:
        named = re.sub(r"\\(?:text|mathrm)\{([^}]*)\}", r"\1", found[1])
        return re.sub(r"\\[a-z]+", lambda name: LETTERS.get(name[0], name[0]), named)

    return re.sub(r"\$([^$\n]+)\$", letters, text)


def record(figures: str | Path, pattern: str) -> list[str]:
    """Where, when and how often the seconds in a notebook's files were measured, a sentence each;
    none if it measures none.
    """
    notes = []
    for path in sorted(Path(figures).glob(f"{pattern}.json")):
        if measured := json.loads(path.read_text()).get("measured"):
            repeats, note = measured["repeats"], measured.get("note")
            times = "1 repeat" if repeats == 1 else f"{repeats} repeats"
            where = f"Measured on {measured['machine']}, {measured['date']}, {times}"
            notes.append(where + (f" ({note})." if note else "."))
    notes = list(dict.fromkeys(notes))
    if notes and (Path(figures) / "here").is_dir():
        notes.append(
            "What the machine at hand measures goes to [a page of its own](here/index.html)."
        )
    return notes


def section(path: str | Path, figures: str | Path = COMMITTED) -> tuple[str, str]:
    """One executed notebook as (title, HTML)."""
    path, notebook = Path(path), nbformat.read(path, as_version=4)
    intro = next(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    title, _, intro = intro.lstrip("# ").partition("\n")
    intro = re.sub(r"^\[(?:← |map).*\n", "", intro, flags=re.M)  # links between notebooks
    outputs = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    read = [
        output["data"]["text/markdown"]
        for output in outputs
        if "text/markdown" in output.get("data", {})
    ]
    pattern = f"{path.stem}*"
    if path.parent.parent.name == "runs":  # a stage of a training run
        pattern, title = f"{path.stem}*-{path.parent.name}", f"{title} ({path.parent.name})"
    parts = [markdown2html(plain(intro))]
    for picture in sorted(Path(figures).glob(f"{pattern}.png")):
        links = ", ".join(
            f'<a href="{html.escape(file.name)}">{html.escape(file.suffix[1:])}</a>'
            for file in sorted(Path(figures).glob(f"{picture.stem}.*"))
        )
        words = html.escape(caption(picture.stem))
        parts.append(
            f'<figure><img src="{html.escape(picture.name)}" alt="{words}"><figcaption>{words}'
            f" {links}</figcaption></figure>"
        )
    tables = sorted(Path(figures).glob(f"{pattern}.md"))
    for table in sorted(tables, key=lambda table: "_reading" in table.stem):  # readings come last
        parts.append(f'<div class="wide">{markdown2html(table.read_text())}</div>')
    if any("_reading" in table.stem for table in tables):
        read = []
    if notes := record(figures, pattern):
        read = [" ".join(notes)]  # the reading is among the files
    return title, "\n".join(parts + [markdown2html(plain(text)) for text in read[-1:]])


def write(paths: Iterable[str | Path], figures: str | Path = COMMITTED) -> Path:
    """figures/index.html from executed notebooks."""
    found = sorted({Path(path) for path in paths}, key=lambda path: (path.stem, path.parent.name))
    sections = [
        (re.sub(r"\W+", "-", f"{path.stem}-{path.parent.name}"), *section(path, figures))
        for path in found
    ]
    links = "\n".join(
        f'<a href="#{name}">{html.escape(title)}</a><br>' for name, title, _ in sections
    )
    body = "\n".join(
        f'<section id="{name}"><h2>{html.escape(title)}</h2>{content}</section>'
        for name, title, content in sections
    )
    explorer = ""
    if (Path(figures) / "explorer.html").exists():
        explorer = '<p><a href="explorer.html">Move ε</a> and see what it costs.</p>'
    with writing(Path(figures) / "index.html") as aside:
        aside.write_text(
            '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport"'
            ' content="width=device-width"><title>cats: every figure and'
            f" table</title><style>{STYLE}</style><h1>cats: every figure and"
            f" table</h1>{explorer}<nav>{links}</nav>{body}"
            "<footer>Made by make figures.</footer></html>\n"
        )
    return Path(figures) / "index.html"


if __name__ == "__main__":
    print(write(sys.argv[2:], sys.argv[1]))
