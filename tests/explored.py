"""The explorer's page asked everything, and its answers compared with Python's: for
test_explorer.py, in node, and test_browser.py, in a browser.
"""

import numpy as np

from cats.paper import explorer

# 19 values of ε: both ends of the slider, and what readers will ask for
ASKED = (10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 400, 500, 700, 1000, 1400, 2000, 3000, 4000)
ASKED += (5000,)
# all answers of a page, one line a table and measure; exits as characters, layer 1 is "!"
EVERYTHING = """
function everything(data, asked) {
  return data.tables.map((table, index) => Object.keys(table.scores).map((measure) => {
    const set = prepare(openTable(data, index, measure));
    return Object.keys(data.methods).map((method) => asked.map((e) => {
      const { thresholds, exits } = answer(set, method, e);
      return [thresholds.map(String), String.fromCharCode(...exits.map((exit) => exit + 32))];
    }));
  }));
}
"""


def shown(values):
    """Thresholds as the page has them, in words."""
    words = {"Infinity": np.inf, "-Infinity": -np.inf}
    return np.array([words[value] if value in words else float(value) for value in values])


def differences(samples, said):
    """Where the page and Python differ, in words; nothing if they agree to the last exit."""
    compared = 0
    for sample, by_measure in zip(samples, said, strict=True):
        for measure, by_method in zip(sample.codes, by_measure, strict=True):
            for method, by_epsilon in zip(explorer.METHODS, by_method, strict=True):
                for e, (thresholds, exits) in zip(ASKED, by_epsilon, strict=True):
                    where = (*sample.about.values(), measure, method, e)
                    wanted = explorer.answer(sample, measure, method, e)
                    compared += 1
                    if not np.array_equal(shown(thresholds), wanted[0]):
                        yield f"thresholds of {where}"
                    if [ord(exit) - 32 for exit in exits] != wanted[1].tolist():
                        yield f"exits of {where}"
    assert compared >= len(explorer.METHODS) * len(ASKED) * len(samples)
