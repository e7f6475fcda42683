"""Screenshots of the report for docs/report.md, taken in Chromium: python -m benchmarks.screenshots

Needs Chromium with its driver, the real weights beside the checkout (benchmarks/data.py), and selenium.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

import factorpack as fp
from benchmarks.data import checkpoint
from benchmarks.formatting import ROOT, load_result
from factorpack.commands.report import comparison_facts
from factorpack.report.facts import gather
from factorpack.report.html import write_page

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FIGURES = ROOT / "docs" / "figures"
RATIO = 12
WIDTH = 1280
PARTS = {"light": ("header", "#curves"), "dark": ("#pareto", "#tensors")}
"""The screenshot in each theme goes from the top of one part of the page to the bottom of another."""
_MARGIN = 20


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """A browser with default settings that fetches nothing for itself and keeps what pages log."""
    options = Options()
    options.binary_location = str(CHROMIUM)
    with tempfile.TemporaryDirectory() as profile:
        for flag in (
            "headless=new",
            "no-sandbox",
            "disable-gpu",
            "disable-quic",
            "no-first-run",
            "disable-background-networking",
            "disable-component-update",
            "disable-sync",
            "disable-dev-shm-usage",
            "hide-scrollbars",
            f"user-data-dir={profile}",
        ):
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options, Service(str(DRIVER)))
        try:
            yield driver
        finally:
            driver.quit()


def show(driver: webdriver.Chrome, page: Path, width: int, height: int, dark: bool = False) -> None:
    """Opens a page in a window of this size, light or dark, without motion."""
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
    )
    features = [
        {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.get(page.resolve().as_uri())


def capture(driver: webdriver.Chrome, page: Path, dark: bool, first: str, last: str) -> Image.Image:
    """The page from the element `first` to the element `last`."""
    show(driver, page, WIDTH, 2000, dark)
    height = driver.execute_script("return document.documentElement.scrollHeight")
    show(driver, page, WIDTH, height, dark)
    box = "return document.querySelector(arguments[0]).getBoundingClientRect()"
    top = driver.execute_script(f"{box}.top", first) - _MARGIN
    bottom = driver.execute_script(f"{box}.bottom", last) + _MARGIN
    whole = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    return whole.crop((0, max(int(top), 0), WIDTH, int(bottom)))


def real_page(model: str, folder: Path) -> Path:
    """The report of a real model within a budget, with its curves and the comparison in benchmarks/results."""
    packed_path, curves = folder / f"{model}.packed.safetensors", folder / f"{model}.curves.json"
    packed = fp.compress(checkpoint(model), ratio=RATIO, curves=curves)
    fp.save(packed, packed_path)
    comparison = folder / f"{model}.json"
    comparison.write_text(json.dumps(load_result("compare", model)["result"]))
    facts = gather(packed, checkpoint(model), packed.curves, [comparison_facts(comparison)])
    write_page(facts, folder / f"{model}.html")
    return folder / f"{model}.html"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--output", type=Path, default=FIGURES)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, chromium() as driver:
        page = real_page(arguments.model, Path(folder))
        for theme, (first, last) in PARTS.items():
            taken = capture(driver, page, theme == "dark", first, last)
            target = arguments.output / f"report-{theme}.png"
            # A page has few colours, and rare ones matter: a legend's are a few pixels.
            small = taken.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            small.save(target, optimize=True)
            print(f"{target.name}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
