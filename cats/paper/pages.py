"""What the site is made of: gathered in build/pages, its contents listed in build/mkdocs.yml.

    python -m cats.paper.pages build/demo     # then mkdocs build -f build/mkdocs.yml: make site

Files keep their places, so that links between them hold. Notebooks are those of the last batch; one
that has not run is shown without results. The package's pages are made from its docstrings by
mkdocstrings, which loads `Plain` from here.
"""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import nbformat
import yaml

from cats.paper.places import BUILD, COMMITTED, ROOT
from cats.paper.site import plain

try:
    from griffe import Extension
except ImportError:  # an extra, and only mkdocstrings needs it
    Extension = object

STORY = {  # notebooks by the tens of their numbers
    "Start": "0",
    "Calibration": "1",
    "The paper": "2",
    "Its appendices": "3",
    "Beyond it": "4",
    "Your own model": "5",
    "Scale": "6",
}
ROOMS = {
    "stats": "scores in, thresholds out",
    "model": "F layer by layer",
    "train": "from text to tables",
    "runtime": "a classifier that stops early",
}
CSS = """
.md-grid { max-width: 76rem }
.jp-RenderedHTMLCommon table, .md-typeset .jp-OutputArea table { display: block; overflow-x: auto }
.jupyter-wrapper img { max-width: 100%; height: auto }
"""
# A page from a file may start no worker, and the theme would fetch a stand-in from a network: this
# one runs the search in a hidden frame.
FETCHED = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
WORKER = """<script>
if (location.protocol === "file:") window.Worker = class extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.frame = frame.contentWindow;
    this.frame.postMessage = (data) => {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    };
    const script = this.frame.document.createElement("script");
    this.ready = new Promise((resolve) => script.addEventListener("load", resolve));
    script.src = new URL(url, document.baseURI);
    this.frame.document.body.append(script);
    this.terminate = () => frame.remove();
  }
  postMessage(data) {
    this.ready.then(() => this.frame.dispatchEvent(new MessageEvent("message", { data })));
  }
};
</script>"""


def on_post_build(config: Any) -> None:
    """What mkdocs calls at its end: no page fetches anything."""
    for path in Path(config["site_dir"]).rglob("*.html"):
        text = path.read_text()
        if FETCHED in text:
            path.write_text(text.replace(FETCHED, WORKER))


class Plain(Extension):
    """Docstrings as Markdown: parameters become a list, doctests a block of code."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = marked(obj.docstring.value)


def marked(text: str) -> str:
    """A docstring in Markdown.

    >>> print(marked("Two ranks.\\n\\nn      how many\\nlevel  between\\n       0 and 1"))
    Two ranks.
    <BLANKLINE>
    * **n**: how many
    * **level**: between 0 and 1
    """
    blocks = []
    for block in re.split(r"\n{2,}", text.strip("\n")):
        lines = block.split("\n")
        if lines[0].startswith(">>>"):
            block = "\n".join(["```pycon", *lines, "```"])
        elif re.match(r"[\w`*./, ]+? {2,}\S", lines[0]) and not block.startswith(" "):
            items = re.sub(r"\n {3,}", " ", block).split("\n")
            block = "\n".join(re.sub(r"^(\S.*?) {2,}", r"* **\1**: ", item) for item in items)
        elif ">>>" in block and not block.startswith(" "):  # said and shown in one breath
            words, code = block.split("\n>>>", 1)
            block = f"{words}\n\n```pycon\n>>>{code}\n```"
        blocks.append(block)
    return "\n\n".join(blocks)


def executed(name: str, batch: Path) -> Path:
    """A notebook as the batch ran it, of the first training run if it is a stage; else as it is."""
    ran = [batch / f"{name}.ipynb", *sorted(batch.glob(f"runs/*/{name}.ipynb"))]
    return next((path for path in ran if path.exists()), ROOT / f"notebooks/{name}.ipynb")


def notebook(path: Path, to: Path) -> str:
    """Copy a notebook, its formulas in plain letters, without widgets, which need Python; its
    title.
    """
    content = nbformat.read(path, as_version=4)
    content.metadata.pop("widgets", None)
    for cell in content.cells:
        if cell.cell_type == "markdown":
            cell.source = plain(cell.source)
        cell.get("outputs", [])[:] = [
            output
            for output in cell.get("outputs", [])
            if "application/vnd.jupyter.widget-view+json" not in output.get("data", {})
        ]
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "text/markdown" in data:
                data["text/markdown"] = plain(data["text/markdown"])
    nbformat.write(content, to)
    return content.cells[0].source.lstrip("# ").partition("\n")[0]


def reference(folder: Path) -> list[dict]:
    """A page for every module of a room, and their table of contents."""
    contents = []
    for room, what in ROOMS.items():
        modules = [path.stem for path in sorted((ROOT / "cats" / room).glob("*.py"))]
        pages = []
        for module in modules:
            if module == "__init__":
                continue
            name = f"cats.{room}.{module}"
            (folder / f"{name}.md").write_text(f"# {name}\n\n::: {name}\n")
            pages.append({module: f"api/{name}.md"})
        contents.append({f"{room}: {what}": pages})
    return contents


def gather(batch: str | Path, build: str | Path = BUILD) -> Path:
    """Everything in its place under build/pages, and build/mkdocs.yml; returns the latter."""
    batch, build = Path(batch), Path(build)
    pages = build / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    for folder in ("api", "data", "notebooks"):
        (pages / folder).mkdir(parents=True)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "data/README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, pages / name)
    shutil.copytree(COMMITTED, pages / "figures", ignore=shutil.ignore_patterns("here", "*.json"))
    # mkdocs makes index.html of the README
    (pages / "figures/index.html").rename(pages / "figures/one_page.html")
    (pages / "extra.css").write_text(CSS)
    names = [path.stem for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    titles = {
        name: notebook(executed(name, batch), pages / f"notebooks/{name}.ipynb") for name in names
    }
    story = [
        {part: [{titles[name]: f"notebooks/{name}.ipynb"} for name in names if name[0] == tens]}
        for part, tens in STORY.items()
    ]
    figures = [{"Move ε": "figures/explorer.html"}, {"On one page": "figures/one_page.html"}]
    if (pages / "figures/README.md").exists():
        figures.append({"Every result": "figures/README.md"})
    contents = [
        {"Home": ["README.md", {"Data": "data/README.md"}, {"Changes": "CHANGELOG.md"}]},
        {"Explorer": figures},
        {"Notebooks": story},
        {"Package": reference(pages / "api")},
        {"Contributing": "CONTRIBUTING.md"},
    ]
    config = {
        "INHERIT": str(ROOT / "mkdocs.yml"),
        "docs_dir": "pages",
        "site_dir": "site",
        "hooks": [__file__],
        "nav": contents,
    }
    path = build / "mkdocs.yml"
    path.write_text(yaml.safe_dump(config, allow_unicode=True, sort_keys=False))
    return path


if __name__ == "__main__":
    print(gather(sys.argv[1]))
