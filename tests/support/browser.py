"""A real headless browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def browser() -> Iterator[Any]:
    """A browser that is closed afterwards; the test is skipped where there is none."""
    from selenium import webdriver

    found = [path for path in map(shutil.which, BROWSERS) if path]
    driver = shutil.which("chromedriver")
    if not found or driver is None:
        pytest.skip("needs a browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = found[0]
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "window-size=900,800"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    page = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        yield page
    finally:
        page.quit()
