"""The page of everything shows what a notebook says, its pictures and tables, and its reading, and
nobody else's.
"""

import json

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from cats.paper import site


def executed(path, title, reading):
    path.parent.mkdir(parents=True, exist_ok=True)
    output = new_output("execute_result", {"text/markdown": reading}, execution_count=1)
    cells = [
        new_markdown_cell(f"# {title}\n\nShows **Table 3**."),
        new_code_cell("1", outputs=[output]),
    ]
    nbformat.write(new_notebook(cells=cells), path)
    return path


def test_page(tmp_path):
    one = executed(tmp_path / "build" / "23_tables.ipynb", "23 · Tables", "It *agrees*.")
    stage = executed(
        tmp_path / "build" / "runs" / "imdb-tiny-0" / "05_scores.ipynb",
        "05 · Scores",
        "Done & <read>.",
    )
    figures = tmp_path / "figures"
    figures.mkdir()
    for name in (
        "23_tables.png",
        "23_tables.csv",
        "05_scores-imdb-tiny-0.png",
        "05_scores-imdb-other-0.png",
    ):
        (figures / name).write_bytes(b"x")
    (figures / "23_tables_classification.md").write_text(
        "| method | layers |\n|:--|:--|\n| shared | 7.10 |\n"
    )
    page = site.write([one, stage], figures).read_text()
    assert page.index("05 · Scores (imdb-tiny-0)") < page.index("23 · Tables")
    assert (
        '<img src="23_tables.png"' in page
        and '<a href="23_tables.csv">csv</a>' in page
        and "<strong>Table 3</strong>" in page
    )
    assert "<td>7.10</td>" in page.replace(' style="text-align: left;"', "").replace(
        ' style="text-align:left"', ""
    )
    assert (
        "<em>agrees</em>" in page
        and 'src="05_scores-imdb-tiny-0.png"' in page
        and "imdb-other" not in page
    )
    assert site.write([stage, one], figures).read_text() == page


def test_seconds_are_shown_as_recorded(tmp_path):
    """Whatever a run measured, the record's page does not change; the run has a page of its own."""
    pages = []
    for reading in ("Takes 41 %.", "Takes 57 %."):
        run = executed(tmp_path / "build" / "25_efficiency.ipynb", "25 · Efficiency", reading)
        for figures, text, date in (
            (tmp_path / "figures", "Takes 40 %.", "2026-11-17"),
            (tmp_path / "figures/here", reading, "2027-01-01"),
        ):
            figures.mkdir(exist_ok=True)
            measured = {"machine": "2 threads of Some Processor", "date": date, "repeats": 2}
            (figures / "25_efficiency.json").write_text(json.dumps({"measured": measured}))
            (figures / "25_efficiency_reading.md").write_text(text)
            (figures / "25_efficiency_table_5.md").write_text("| a |\n|:--|\n| b |\n")
        pages.append(site.write([run], tmp_path / "figures").read_text())
        own = site.write([run], tmp_path / "figures/here").read_text()
        assert reading in own and "Takes 40 %." not in own and "2027-01-01" in own
    assert pages[0] == pages[1] and pages[0].index("<td") < pages[0].index("Takes 40 %.")
    assert (
        "Measured on 2 threads of Some Processor, 2026-11-17, 2 repeats." in pages[0]
        and 'href="here/index.html"' in pages[0]
    )


def test_formulas_are_readable_without_mathjax():
    assert (
        site.plain(r"above $P(F=Y)-\varepsilon$, $V \le \tau$ and $r=3$; costs 5 $")
        == "above P(F=Y)-ε, V ≤ τ and r=3; costs 5 $"
    )
