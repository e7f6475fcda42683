"""The report's page in a real Chromium: it draws, sorts, filters, fits, and logs nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="drives a browser with selenium")
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

import factorpack as fp
from benchmarks.screenshots import CHROMIUM, DRIVER, chromium, show
from factorpack.budget.curves import Curve
from factorpack.report.facts import ComparisonFacts, CurveFacts, Facts, PointFacts, TensorFacts, gather
from factorpack.report.html import write_page
from tests.helpers import seeded

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs Chromium and its driver")

HOSTILE = "</script><img src=x onerror=\"document.title='broken'\">"
STATE = {
    "stem.weight": seeded(16, 3, 3, 3),
    **{f"blocks.{place}.weight": seeded(32, 16 * (place + 1), 3, 3, seed=place) for place in range(4)},
    **{f"blocks.{place}.bias": seeded(32, seed=place) for place in range(4)},
    "fc.weight": seeded(10, 64),
    HOSTILE: seeded(24, 24),
}
METHODS = ("planned", "VQ <b>", "AQ")
WIDTHS = (360, 768, 1400)


def real_facts(folder: Path) -> Facts:
    packed = fp.compress(STATE, fp.QSPCA(16, 3, tile=64), layers={"blocks.2.weight": fp.methods.VQ(16, 8)})
    fp.save(packed, folder / "net.safetensors")
    curves = {
        name: Curve([1, 2, 4], [9000, 5000, 900], [1e-4 * (place + 1), 1e-2, 1.0], 9216, 9, 1.0)
        for place, name in enumerate(("blocks.1.weight", "blocks.2.weight"))
    }
    points = tuple(
        PointFacts(method, 10_000 * size, 10 / size, 0.7 - 0.05 * place / size, f"{method} at {size}")
        for place, method in enumerate(METHODS)
        for size in (1, 2, 3)
    )
    comparison = ComparisonFacts(
        "nets", "top-1", 0.7, 100_000, (*points, PointFacts("AQ", 5_000, 20.0, 0.1, ""))
    )
    return gather(fp.load(folder / "net.safetensors"), STATE, curves, [comparison])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    write_page(real_facts(folder), folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    with chromium() as driver:
        yield driver


@pytest.fixture
def shown(browser: Chrome, page: Path) -> Iterator[Chrome]:
    """The page, wide and light; whatever a test does, the browser has nothing to complain about."""
    show(browser, page, 1400, 1000)
    yield browser
    assert browser.get_log("browser") == []
    assert browser.title.startswith("net.safetensors")


def find(driver: Chrome, css: str) -> list[WebElement]:
    found: list[WebElement] = driver.find_elements(By.CSS_SELECTOR, css)
    return found


def column(driver: Chrome, place: int) -> list[str]:
    """A column of the table from top to bottom."""
    script = (
        "return [...document.querySelectorAll('tbody tr')].map(row => row.cells[arguments[0]].textContent)"
    )
    texts: list[str] = driver.execute_script(script, place)
    return texts


def heading(driver: Chrome, title: str) -> tuple[int, WebElement]:
    heads = find(driver, "thead th")
    place = next(place for place, head in enumerate(heads) if head.text.split(" ")[0] == title)
    return place, heads[place]


def click(driver: Chrome, element: WebElement) -> None:
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()


def hover(driver: Chrome, element: WebElement) -> None:
    """Points at an element until its tip is there: one that comes while the page still scrolls is hidden again."""
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    for _ in range(50):
        ActionChains(driver).move_to_element_with_offset(element, 1, 1).move_to_element(element).perform()
        if find(driver, "#tip")[0].is_displayed():
            return
    raise AssertionError("no tip is shown")


class TestTable:
    def test_the_largest_come_first(self, shown: Chrome) -> None:
        place, head = heading(shown, "bytes")
        assert head.get_attribute("aria-sort") == "descending"
        sizes = [int(text.replace(",", "")) for text in column(shown, place)]
        assert len(sizes) == len(STATE)
        assert sizes == sorted(sizes, reverse=True)

    def test_a_heading_sorts_both_ways(self, shown: Chrome) -> None:
        place, head = heading(shown, "bytes")
        click(shown, head.find_element(By.TAG_NAME, "button"))
        assert head.get_attribute("aria-sort") == "ascending"
        sizes = [int(text.replace(",", "")) for text in column(shown, place)]
        assert sizes == sorted(sizes)
        place, named = heading(shown, "tensor")
        click(shown, named.find_element(By.TAG_NAME, "button"))
        assert (named.get_attribute("aria-sort"), head.get_attribute("aria-sort")) == ("ascending", None)
        names = [name for name in column(shown, place) if name != HOSTILE]
        assert names == sorted(names)
        click(shown, named.find_element(By.TAG_NAME, "button"))
        assert [name for name in column(shown, place) if name != HOSTILE] == names[::-1]

    def test_what_has_no_value_comes_last_either_way(self, shown: Chrome) -> None:
        place, head = heading(shown, "zeros")
        for _ in range(2):
            click(shown, head.find_element(By.TAG_NAME, "button"))
            texts = column(shown, place)
            present = [text for text in texts if text]
            assert 0 < len(present) < len(texts)
            assert texts[: len(present)] == present

    def test_words_filter(self, shown: Chrome) -> None:
        box = find(shown, "#filter")[0]
        click(shown, box)
        box.send_keys("BLOCKS. codewords")
        assert column(shown, 0) == ["blocks.2.weight"]
        assert find(shown, "#shown")[0].text.startswith(f"1 of {len(STATE)} tensors")
        box.send_keys(" nothing")
        assert find(shown, "tbody .empty")
        box.clear()
        box.send_keys(Keys.SPACE)
        assert len(column(shown, 0)) == len(STATE)

    def test_rows_by_keys(self, shown: Chrome) -> None:
        rows = find(shown, "tbody tr")
        assert [row.get_attribute("tabindex") for row in rows] == ["0"] + ["-1"] * (len(rows) - 1)
        shown.execute_script("arguments[0].focus()", rows[0])
        ActionChains(shown).send_keys(Keys.ARROW_DOWN, Keys.ENTER).perform()
        assert find(shown, "#layer h3")[0].text == column(shown, 0)[1]
        assert rows[1].get_attribute("aria-current") == "true"


class TestTreemap:
    def test_areas_are_bytes_and_tiles_fill_the_box(self, shown: Chrome) -> None:
        script = """
          const box = document.getElementById('treemap').getBoundingClientRect();
          return [box.width * box.height, [...document.querySelectorAll('.tile')].map(tile => {
            const at = tile.getBoundingClientRect();
            return [tile.getAttribute('aria-label'), at.left - box.left, at.top - box.top, at.width + 1, at.height + 1];
          }), box.width, box.height];"""
        area, tiles, width, height = shown.execute_script(script)
        assert sum(w * h for _, _, _, w, h in tiles) == pytest.approx(area, rel=0.05)
        assert all(
            x >= -1 and y >= -1 and x + w <= width + 1 and y + h <= height + 1 for _, x, y, w, h in tiles
        )
        facts = json.loads(shown.execute_script("return document.getElementById('facts').textContent"))
        sizes = {tensor["name"]: tensor["bytes"] for tensor in facts["tensors"]}
        placed = [
            (sizes[label.rpartition(", ")[0]], w * h)
            for label, _, _, w, h in tiles
            if label.rpartition(", ")[0] in sizes
        ]
        assert len(placed) >= 5
        for size, found in placed:
            assert found == pytest.approx(area * size / facts["file_bytes"], rel=0.1, abs=250)

    def test_tiles_do_not_overlap(self, shown: Chrome) -> None:
        boxes = [tile.rect for tile in find(shown, ".tile")]
        for place, one in enumerate(boxes):
            for other in boxes[:place]:
                wide = min(one["x"] + one["width"], other["x"] + other["width"]) - max(one["x"], other["x"])
                high = min(one["y"] + one["height"], other["y"] + other["height"]) - max(one["y"], other["y"])
                assert min(wide, high) <= 1

    def test_pointer_and_keys_show_the_same(self, shown: Chrome) -> None:
        tiles = find(shown, ".tile")
        hover(shown, tiles[0])
        tip = find(shown, "#tip")[0]
        assert tip.is_displayed()
        by_pointer = tip.text
        ActionChains(shown).send_keys(Keys.ESCAPE).perform()
        assert not tip.is_displayed()
        ActionChains(shown).move_by_offset(0, -300).perform()
        find(shown, "[role=radio]")[0].send_keys(Keys.TAB)
        assert shown.switch_to.active_element == tiles[0]
        assert tip.text == by_pointer
        ActionChains(shown).send_keys(Keys.ARROW_RIGHT, Keys.ENTER).perform()
        assert shown.switch_to.active_element == tiles[1]
        assert tiles[1].get_attribute("aria-pressed") == "true"
        assert find(shown, "#layer h3")[0].text in tiles[1].get_attribute("aria-label")

    def test_colours_by_bits(self, shown: Chrome) -> None:
        by_kind = find(shown, ".tile")[0].value_of_css_property("background-color")
        bits = next(button for button in find(shown, "[role=radio]") if button.text == "bits per weight")
        click(shown, bits)
        assert bits.get_attribute("aria-checked") == "true"
        assert find(shown, ".tile")[0].value_of_css_property("background-color") != by_kind
        assert "not coded" in find(shown, "#treemap-legend")[0].text


class TestCharts:
    def test_the_layer_has_a_histogram_of_its_errors(self, shown: Chrome) -> None:
        assert len(find(shown, "#layer .histogram")) == 41

    def test_a_curve_a_weight_and_a_click_shows_it(self, shown: Chrome) -> None:
        assert len(find(shown, "#curves .curve")) == len(find(shown, "#curves .dot")) == 2
        dot = next(
            dot for dot in find(shown, ".dot") if dot.get_attribute("aria-label").startswith("blocks.1")
        )
        hover(shown, dot)
        assert find(shown, "#tip b")[0].text == "blocks.1.weight"
        ActionChains(shown).click().perform()
        assert find(shown, "#layer h3")[0].text == "blocks.1.weight"

    def test_exact_values_over_a_point_and_methods_that_can_be_left_out(self, shown: Chrome) -> None:
        assert "FP32 70.0 %" in find(shown, ".pareto svg")[0].text
        mark = next(
            mark for mark in find(shown, ".mark") if mark.get_attribute("aria-label").endswith("planned at 2")
        )
        hover(shown, mark)
        tip = find(shown, "#tip")[0].text
        assert all(words in tip for words in ("planned", "70.00 %", "20,000", "5.00"))
        count = len(find(shown, ".mark"))
        button = next(button for button in find(shown, ".legend button") if button.text == "VQ <b>")
        click(shown, button)
        assert button.get_attribute("aria-pressed") == "false"
        assert len(find(shown, ".mark")) == count - 3
        click(shown, button)
        assert len(find(shown, ".mark")) == count

    def test_far_points_have_a_view_of_their_own(self, shown: Chrome) -> None:
        near = len(find(shown, ".mark"))
        click(shown, next(button for button in find(shown, "[role=radio]") if button.text == "all points"))
        assert len(find(shown, ".mark")) == near + 1


class TestLooks:
    @pytest.mark.parametrize("width", WIDTHS)
    def test_the_page_never_scrolls_sideways(self, width: int, shown: Chrome, page: Path) -> None:
        show(shown, page, width, 800)
        wide = shown.execute_script("return document.documentElement.scrollWidth")
        assert wide <= width
        boxes = "return [...document.querySelectorAll('h1, h2, h3, .number, .card')]"
        assert shown.execute_script(f"{boxes}.filter(e => e.scrollWidth > e.clientWidth + 1).length") == 0

    def test_the_head_of_the_table_stays(self, shown: Chrome, page: Path) -> None:
        show(shown, page, 360, 640)
        script = """
          const box = document.getElementById('table-box'); box.style.maxHeight = '150px';
          box.scrollTo(80, 100);
          const head = document.querySelector('thead th').getBoundingClientRect();
          const name = document.querySelector('tbody th').getBoundingClientRect();
          const at = box.getBoundingClientRect();
          return [head.top - at.top, name.left - at.left];"""
        assert shown.execute_script(script) == [pytest.approx(1, abs=1), pytest.approx(1, abs=1)]

    @pytest.mark.parametrize("dark", [False, True])
    def test_letters_stand_out(self, dark: bool, shown: Chrome, page: Path) -> None:
        show(shown, page, 1400, 1000, dark)
        for way in range(3):
            click(shown, find(shown, "#colour-by [role=radio]")[way])
            assert contrasts(shown), "found text"
            assert [line for line in contrasts(shown) if line[1] < 4.5] == []

    def test_the_theme_can_be_chosen(self, shown: Chrome, page: Path) -> None:
        for dark in (False, True):
            show(shown, page, 1400, 1000, dark)
            button, body = find(shown, "#theme")[0], find(shown, "body")[0]
            before = body.value_of_css_property("background-color")
            assert button.text == ("Light" if dark else "Dark")
            button.click()
            changed = body.value_of_css_property("background-color")
            assert changed != before
            assert button.text == ("Dark" if dark else "Light")
            button.click()
            assert body.value_of_css_property("background-color") == before

    def test_printed_it_is_whole_and_light(self, shown: Chrome, page: Path) -> None:
        show(shown, page, 1000, 800, dark=True)
        shown.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        box = find(shown, "#table-box")[0]
        assert box.value_of_css_property("max-height") == "none"
        assert not find(shown, "#theme")[0].is_displayed()
        assert find(shown, "h1")[0].value_of_css_property("color") == "rgba(23, 26, 32, 1)"
        shown.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})

    def test_it_can_be_read_aloud(self, shown: Chrome) -> None:
        levels = [element.tag_name for element in find(shown, "h1, h2, h3")]
        assert levels[0] == "h1"
        assert levels.count("h1") == 1
        unnamed = """return [...document.querySelectorAll('button, input, [role=group], [role=img], [role=region]')]
          .filter(e => !(e.ariaLabel || e.textContent.trim() || e.labels?.length || e.getAttribute('aria-labelledby')))
          .map(e => e.outerHTML)"""
        assert shown.execute_script(unnamed) == []


CONTRAST = """
function parts(colour) { return colour.match(/[\\d.]+/g).map(Number); }
function light([r, g, b]) {
  const lin = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  return 0.2126 * lin(r) + 0.7152 * lin(g) + 0.0722 * lin(b);
}
function behind(element) {
  for (let at = element; at; at = at.parentElement) {
    const found = parts(getComputedStyle(at).backgroundColor);
    if (found.length < 4 || found[3] === 1) return found;
  }
  return [255, 255, 255];
}
const out = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest('script, noscript')) continue;
  const style = getComputedStyle(element);
  const [ink, paper] = [light(parts(element.closest('svg') ? style.fill : style.color)), light(behind(element))];
  out.push([walker.currentNode.data, (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05)]);
}
return out;"""


def contrasts(driver: Chrome) -> list[tuple[str, float]]:
    """Every text that is seen, with the contrast of its colour and what lies behind it, as WCAG counts it."""
    found: list[tuple[str, float]] = driver.execute_script(CONTRAST)
    return found


def many(count: int) -> Facts:
    """A model of as many tensors as a large language model has."""
    tensors = tuple(
        TensorFacts(
            f"model.layers.{place // 9}.part{place % 9}.weight",
            f"model.layers.{place // 9}",
            "scalar" if place % 9 else "keep",
            (1000, 100 + place),
            "4 bits, 30% zeros",
            "",
            400_000 + place,
            50_000 + 37 * place,
            {"latent": 49_000 + 37 * place, "scales": 1000},
            4.0 + place / count,
            0.3,
            0.1,
            0.01,
            tuple(range(41)),
        )
        for place in range(count)
    )
    size = sum(tensor.bytes for tensor in tensors)
    original = sum(tensor.original_bytes for tensor in tensors)
    return Facts("large.safetensors", size, original, original, original // 4, tensors, 0, 0.1)


def one(kind: str, **changed: Any) -> Facts:
    tensor = TensorFacts("w", "w", kind, (), "as it is", "", 4, 60, {"values": 4, "header": 56}, 32.0, None)
    return Facts("one.safetensors", 60, 4, 4, 1, (replace(tensor, **changed),), 1)


ODD = {
    "no tensors": replace(one("keep"), tensors=(), numbers=0),
    "one number": one("keep"),
    "a constant that is another": one("constant", error=None, problem="unrelated"),
    "no bytes": one("levels", bytes=0, stored_bytes={}, shape=(0,), bits=0.0),
    "one code": one("codewords", error=0.0, largest_error=0.0, histogram=(0,) * 20 + (1,) + (0,) * 20),
    "no error at all": replace(
        one("scalar"),
        curves=(CurveFacts("w", (0.0, 0.0), (0.0, 0.0), 0.0, 0.0),),
        comparisons=(
            ComparisonFacts("same", "weight error", None, 4, (PointFacts("m", 9, 1.0, 0.0, ""),) * 2),
            ComparisonFacts("none right", "top-1", 0.0, 4, (PointFacts("m", 9, 1.0, 0.0, ""),)),
        ),
    ),
}


@pytest.mark.parametrize("facts", ODD.values(), ids=ODD)
def test_odd_files_draw_too(facts: Facts, browser: Chrome, tmp_path: Path) -> None:
    write_page(facts, tmp_path / "odd.html")
    show(browser, tmp_path / "odd.html", 768, 800)
    assert len(find(browser, "tbody tr")) == len(facts.tensors)
    assert len(find(browser, ".tile")) == sum(tensor.bytes > 0 for tensor in facts.tensors)
    assert "NaN" not in browser.find_element(By.TAG_NAME, "main").get_attribute("innerHTML")
    assert "undefined" not in browser.find_element(By.TAG_NAME, "main").get_attribute("innerHTML")
    assert browser.get_log("browser") == []


def test_2000_tensors_stay_usable(browser: Chrome, tmp_path: Path) -> None:
    size = write_page(many(2000), tmp_path / "large.html")
    assert size < 2_000_000
    show(browser, tmp_path / "large.html", 1400, 1000)
    assert browser.execute_script("return document.querySelectorAll('tbody tr').length") == 2000
    timing: dict[str, Any] = browser.execute_script(
        "return performance.getEntriesByType('navigation')[0].toJSON()"
    )
    assert timing["domComplete"] < 10_000  # milliseconds; a second or so on two busy cores
    script = """
      const started = performance.now();
      document.querySelectorAll('thead button')[arguments[0]].click();
      document.body.getBoundingClientRect();
      return performance.now() - started;"""
    assert browser.execute_script(script, 0) < 5_000
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 1400
    assert browser.get_log("browser") == []
