"""A line of links on top of every notebook: previous, map, next.

python -m cats.paper.links      # writes them, as `make format` does
"""

import json
import re
from pathlib import Path

from cats._io import writing
from cats.paper.places import ROOT

NOTEBOOKS = ROOT / "notebooks"
MAP = "00_start"


def every(folder: Path = NOTEBOOKS) -> list[str]:
    """All notebooks in their order."""
    return sorted(path.stem for path in folder.glob("[0-9][0-9]_*.ipynb"))


def line(name: str, names: list[str]) -> str:
    """The links of one notebook.

    >>> line("10_b", ["00_start", "10_b", "11_c"])
    '[← 00](00_start.ipynb) · [map](00_start.ipynb#The-map) · [11 →](11_c.ipynb)'
    """
    i = names.index(name)
    before, after = names[i - 1 : i], names[i + 1 : i + 2]
    parts = [f"[← {other[:2]}]({other}.ipynb)" for other in before]
    parts.append("[map](#The-map)" if name == MAP else f"[map]({MAP}.ipynb#The-map)")
    return " · ".join(parts + [f"[{other[:2]} →]({other}.ipynb)" for other in after])


def linked(text: str, links: str) -> str:
    """A notebook's first cell with these links under its title, instead of older ones.

    >>> linked("# 10 · B\\n\\nShows.", "[map](x)")
    '# 10 · B\\n\\n[map](x)\\n\\nShows.'
    >>> linked("# 10 · B\\n\\n[← 00](a) · [map](y)\\n\\nShows.", "[map](x)")
    '# 10 · B\\n\\n[map](x)\\n\\nShows.'
    """
    title, _, rest = text.partition("\n")
    rest = re.sub(r"\A\s*(\[← [^\n]*\[map\]\([^\n]*|\[map\]\([^\n]*)\n", "", rest).lstrip("\n")
    return f"{title}\n\n{links}\n\n{rest}"


def contents(folder: Path = NOTEBOOKS) -> list[dict[str, str]]:
    """The map: number, name, title and what each notebook regenerates, read from the notebooks."""
    rows = []
    for name in every(folder):
        text = "".join(json.loads((folder / f"{name}.ipynb").read_text())["cells"][0]["source"])
        ((number, title),) = re.findall(r"\A# (\d+) · (.*)", text)
        found = dict.fromkeys(re.findall(r"\*\*((?:Tables?|Figures?) [^*]*\d)\*\*", text))
        row = {"number": number, "notebook": name, "what": title}
        rows.append(row | {"regenerates": ", ".join(found)})
    return rows


def write(folder: Path = NOTEBOOKS) -> None:
    """Put the links into every notebook."""
    names = every(folder)
    for name in names:
        path = folder / f"{name}.ipynb"
        notebook = json.loads(path.read_text())
        first = notebook["cells"][0]
        text = linked("".join(first["source"]), line(name, names))
        if text != "".join(first["source"]):
            first["source"] = text.splitlines(keepends=True)
            with writing(path) as aside:
                aside.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write()
