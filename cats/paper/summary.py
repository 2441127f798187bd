"""figures/README.md, which GitHub shows with pictures, captions, tables and readings inline; and
the README's block of what was found.

    python -m cats.paper.summary          # writes both, from what is in figures/
"""

import re
import textwrap
from pathlib import Path
from typing import Any

from cats._io import writing
from cats.paper import reading, style
from cats.paper.captions import caption
from cats.paper.facts import facts
from cats.paper.links import contents
from cats.paper.places import COMMITTED, ROOT

LONG = 16  # rows of a table that is folded
HEAD = """# Every figure and table

Made by `make figures`, one notebook each; this page by `python -m cats.paper.summary`. Beside each
picture lie its PDF, its numbers (CSV) and how it was made (JSON: parameters, versions, hashes of
the inputs), beside each table its LaTeX.

F is the full model, G the CAT that leaves early. `method/measure` names a calibrator (what each
promises: [README](../README.md#what-is-promised)) and the confidence it reads: `meta`, the meta
classifier's, or `sm`, the largest softmax probability (p max). 0.95 is the target 1 − ε. Ours is
MobileBERT (24 layers) unless said otherwise, the paper's is Albert-xlarge (24 layers): patterns can
be compared, absolute numbers cannot.

## What was found
"""


def filled(name: str, folder: Path = COMMITTED) -> str:
    """A template of notebooks/readings, filled with what was found."""
    text = (reading.READINGS / f"{name}.md").read_text().rstrip()
    return reading.fill(text, facts("found", folder=folder))


def wrapped(text: str) -> str:
    """Lines at most 100 columns wide, a bullet's indented; a number stays with its sign."""
    wrap: dict[str, Any] = dict(width=98, break_long_words=False, break_on_hyphens=False)
    kept = re.sub(r"(?<=[\d%]) (?=[%→])|(?<=[=≥]) (?=\d)|(?<=ε) (?==)", "\N{NO-BREAK SPACE}", text)
    lines = [
        textwrap.fill(line, **wrap, subsequent_indent="  " if line.startswith("- ") else "")
        for line in kept.splitlines()
    ]
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def found(folder: Path = COMMITTED) -> str:
    """The README's findings, a bullet each."""
    return wrapped(filled("summary", folder))


def stems(notebook: str, folder: Path) -> list[str]:
    """The names of a notebook's pictures and tables, runs apart, readings left out."""
    kinds = [*folder.glob(f"{notebook}*.png"), *folder.glob(f"{notebook}*.tex")]
    return sorted({path.stem for path in kinds})


def _title(stem: str) -> str:
    """Of which run a result is, in words."""
    run = re.search(r"-(\w+-.+-\d+)$", stem)
    return f" ({style.title(run[1])})" if run else ""


def _table(path: Path, words: str) -> str:
    text = path.read_text().rstrip()
    if text.count("\n") - 1 <= LONG:
        return f"*{words}*\n\n{text}"
    return f"<details><summary>{words}</summary>\n\n{text}\n\n</details>"


def section(row: dict, folder: Path) -> str:
    """One notebook: its pictures, tables and readings."""
    name, parts = row["notebook"], []
    for stem in stems(name, folder):
        words = caption(stem) + _title(stem)
        links = ", ".join(
            f"[{kind}]({stem}.{kind})"
            for kind in ("pdf", "csv", "tex", "json")
            if (folder / f"{stem}.{kind}").exists()
        )
        if (folder / f"{stem}.png").exists():
            parts.append(f"![{words}]({stem}.png)\n\n*{words}* {links}")
        if (folder / f"{stem}.tex").exists():
            parts.append(_table(folder / f"{stem}.md", words) + f"\n\n{links}")
    parts += [path.read_text().rstrip() for path in sorted(folder.glob(f"{name}_reading*.md"))]
    if not parts:
        return ""
    what = f"{row['number']} · {row['what']}"
    of = f" ({row['regenerates']})" if row["regenerates"] else ""
    return f"## {what}{of}\n\n[notebook](../notebooks/{name}.ipynb)\n\n" + "\n\n".join(parts)


def page(folder: Path = COMMITTED) -> str:
    """figures/README.md."""
    sections = filter(None, (section(row, folder) for row in contents()))
    return "\n\n".join([HEAD + "\n" + filled("found", folder), *sections]) + "\n"


def readme(text: str, folder: Path = COMMITTED) -> str:
    """The README with its blocks anew: the caption of its picture, and what was found."""
    blocks = {"caption": wrapped(f"*{caption('22_consistency')}*"), "found": found(folder)}
    for name, block in blocks.items():
        opening, closing = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(opening)
        text = f"{before}{opening}\n{block}\n{closing}{rest.partition(closing)[2]}"
    return text


def write(folder: Path = COMMITTED) -> None:
    """Write both."""
    for path, text in (
        (folder / "README.md", page(folder)),
        (ROOT / "README.md", readme((ROOT / "README.md").read_text(), folder)),
    ):
        if path.exists() and path.read_text() == text:
            continue
        with writing(path) as aside:
            aside.write_text(text)


if __name__ == "__main__":
    try:
        write()
    except (FileNotFoundError, LookupError, TypeError, StopIteration) as error:
        print(f"READMEs left as they are: figures/ lacks results of the shipped tables ({error})")
