"""The explorer and the site in a real browser, from files and without a network: `make browser`.

It needs Chromium and its driver (Debian: chromium, chromium-driver) and selenium, and is skipped
where they are not. Screenshots go to build/browser/.
"""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from explored import ASKED, EVERYTHING, differences

from cats.paper import explorer
from cats.paper.places import BUILD, COMMITTED

pytest.importorskip("selenium", reason="there is no selenium: make browser installs it")
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="there is no Chromium with its driver"
)
SIZES = {"desk": (1400, 900), "phone": (400, 800)}


@pytest.fixture(scope="module")
def samples():
    return explorer.samples()


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(300)
    yield driver
    driver.quit()


def resize(browser, width, height, dark=False):
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def visit(browser, page="explorer.html", **choices):
    words = "&".join(f"{key}={value}" for key, value in choices.items())
    browser.get("about:blank")  # another address in the same page would not load it again
    browser.get(f"{(COMMITTED / page).as_uri()}#{words}")
    return SimpleNamespace(
        at=lambda name: browser.find_element(By.ID, name),
        number=lambda name: browser.find_element(By.ID, name).text.split("\n")[0],
    )


def whole_picture(browser, name, width, dark=False):
    """A screenshot of the page from top to bottom."""
    resize(browser, width, 900, dark)
    height = browser.execute_script("return document.documentElement.scrollHeight")
    resize(browser, width, min(height, 8000), dark)
    path = BUILD / "browser" / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    assert browser.save_screenshot(str(path))


def fetched(browser):
    """What pages have asked of a network since the last look."""
    return [
        entry["message"]
        for entry in browser.get_log("performance")
        if "Network.requestWillBeSent" in entry["message"] and '"url":"http' in entry["message"]
    ]


def test_the_browser_computes_what_python_computes(browser, samples):
    visit(browser)
    ask = "const data = JSON.parse(document.getElementById('data').textContent);"
    said = browser.execute_script(f"{EVERYTHING}{ask} return everything(data, {list(ASKED)});")
    assert list(differences(samples, said)) == []


def test_the_slider_moves_by_keyboard_and_the_numbers_are_pythons(browser, samples):
    sample = next(
        s for s in samples if (s.about["task"], s.about["recipe"]) == ("ag_news", "paper")
    )
    resize(browser, *SIZES["desk"])
    page = visit(browser, task="ag_news", encoder=sample.about["encoder"], epsilon=0.05)
    notches = sorted(explorer.EPSILONS, reverse=True)
    slider = page.at("epsilon")
    seen = set()
    for method in explorer.METHODS:
        Select(page.at("method")).select_by_value(method)
        for key in (Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT, Keys.HOME, Keys.END):
            slider.send_keys(key)
            e = notches[int(slider.get_attribute("value"))]
            thresholds, exits = explorer.answer(sample, "meta", method, e)
            half = sample.half
            agrees = np.column_stack([sample.consistent, np.ones(len(sample.rows), bool)])[half:]
            agreement = agrees[np.arange(len(exits)), exits - 1].mean()
            assert page.number("layers") == f"{exits.mean():.2f}"
            assert page.number("agreement") == f"{100 * agreement:.1f} %"
            if method == "first_exit" and np.isfinite(thresholds[0]) and thresholds[0] <= 0.9995:
                assert page.number("threshold") == f"{thresholds[0]:.4f}"
            assert f"ε = {e / explorer.PARTS:g}:" in page.at("said").text
            assert f"ε = {e / explorer.PARTS:g}," in slider.get_attribute("aria-valuetext")
            bars = browser.find_elements(By.CSS_SELECTOR, "#histogram .bar title")
            counts = [int(bar.get_attribute("textContent").split()[2]) for bar in bars]
            assert counts == np.bincount(exits, minlength=thresholds.size + 2)[1:].tolist()
            seen.add(e)
    assert {notches[0], notches[-1]} < seen and len(seen) >= 4


def test_every_choice_leads_to_a_table_and_only_to_it(browser, samples):
    for sample in samples:
        about = dict(sample.about)
        if seed := about.pop("seed"):
            about["recipe"] += f", seed {seed}"
        page = visit(browser, **about, measure="sm", method="shared", epsilon=0.1)
        chosen = {key: page.at(key).get_attribute("value") for key in (*about, "measure")}
        measure = "sm" if sample.classes else "meta"  # a regression has no probabilities
        assert chosen == about | {"measure": measure}
        exits = explorer.answer(sample, measure, "shared", 1000)[1]
        assert page.number("layers") == f"{exits.mean():.2f}"


def test_an_input_is_clicked_and_its_way_is_told(browser, samples):
    sample = next(s for s in samples if s.classes)
    about = {key: sample.about[key] for key in ("task", "encoder", "recipe")}
    page = visit(browser, **about, epsilon=0.1)
    exits = explorer.answer(sample, "meta", "first_exit", 1000)[1]
    layer = np.bincount(exits).argmax()
    browser.find_element(By.CSS_SELECTOR, f'.bar[data-layer="{layer}"] .agrees').click()
    inside = sample.half + np.flatnonzero(exits == layer)
    buttons = browser.find_elements(By.CSS_SELECTOR, "#inputs button")
    assert [button.text.split()[0] for button in buttons] == [
        str(row) for row in sample.rows[inside[:24]]
    ]
    buttons[1].send_keys(Keys.SPACE)
    answer = sample.classes[sample.said[inside[1], layer - 1]]
    told = page.at("story").text
    assert told.startswith(f"Row {sample.rows[inside[1]]} leaves at layer {layer} of")
    assert f"with the answer {answer}." in told
    assert browser.switch_to.active_element.text.startswith(str(sample.rows[inside[1]]))
    page.at("wrong").click()
    assert all("≠" in b.text for b in browser.find_elements(By.CSS_SELECTOR, "#inputs button"))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_the_screen_and_is_seen_by_all(browser, size, dark):
    """No sideways scrolling, every picture described, every control named; and no complaint in the
    console, and nothing asked of a network.
    """
    width, height = SIZES[size]
    resize(browser, width, height, dark)
    browser.get_log("browser"), browser.get_log("performance")
    visit(browser, task="vitaminc", epsilon=0.1)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    light = browser.execute_script(
        "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    )
    assert (sum(light) < 200) == dark
    for picture in browser.find_elements(By.TAG_NAME, "svg"):
        assert len(picture.get_attribute("aria-label")) > 40
    for control in browser.find_elements(By.CSS_SELECTOR, "input, select, button"):
        assert control.accessible_name.strip(), control.get_attribute("outerHTML")
    assert browser.get_log("browser") == []
    assert fetched(browser) == []
    whole_picture(browser, f"explorer-{size}-{'dark' if dark else 'light'}", width, dark)


@pytest.mark.skipif(not (BUILD / "site/index.html").exists(), reason="make site comes first")
@pytest.mark.parametrize("size", SIZES)
def test_the_site_is_read_and_searched_from_a_file(browser, size):
    """Pages fit the screen, search finds a calibrator, and nothing is asked of a network."""
    width, height = SIZES[size]
    resize(browser, width, height)
    browser.get_log("browser"), browser.get_log("performance")
    for page in ("index", "notebooks/00_start", "api/cats.stats.calibrators"):
        browser.get((BUILD / f"site/{page}.html").as_uri())
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        whole_picture(browser, f"site-{page.split('/')[-1]}-{size}", width)
        resize(browser, width, height)
    browser.execute_script("document.getElementById('__search').click()")
    box = browser.find_element(By.CSS_SELECTOR, ".md-search__input")
    WebDriverWait(browser, 60).until(lambda _: box.is_displayed() and box.is_enabled())
    box.send_keys("conformal_quantile")
    found = WebDriverWait(browser, 60).until(
        lambda driver: driver.find_elements(By.CSS_SELECTOR, ".md-search-result__link")
    )
    assert any("cats.stats.quantiles" in link.get_attribute("href") for link in found)
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert fetched(browser) == []
