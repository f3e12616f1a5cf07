"""Every page of the built site, as a phone shows it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.browser import browser

pytestmark = pytest.mark.services

PHONE = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": True}

LOOK = """
const width = document.documentElement.clientWidth;  // innerWidth grows with what is too wide
const scrolls = e => { for (let p = e.parentElement; p && p !== document.body; p = p.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(p).overflowX)) return true; return false; };
const page = document.querySelector("article");
const shown = e => e.getBoundingClientRect().width > 0;
const wide = [...page.querySelectorAll("*")].filter(
    e => shown(e) && e.getBoundingClientRect().right > width + 1 && !scrolls(e));
const empty = [...page.querySelectorAll("img")].filter(e => shown(e) && !e.naturalWidth);
return [document.documentElement.scrollWidth - width,
        [...wide, ...empty].map(e => e.outerHTML.slice(0, 80))];
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for extra in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(extra, reason="needs the docs extra: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def phone() -> Iterator[Any]:
    with browser() as found:
        found.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
        yield found


def test_no_page_is_wider_than_a_phone(site: Path, phone: Any) -> None:
    pages = sorted(site.rglob("index.html"))
    assert len(pages) > 50
    wide = {}
    for page in pages:
        phone.get(page.as_uri())
        over, found = phone.execute_script(LOOK)
        if over > 0 or found:
            wide[str(page.relative_to(site))] = (over, found)
    assert not wide


def test_a_page_that_is_wider_is_found(tmp_path: Path, phone: Any) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<meta name=viewport content=width=device-width>"
        "<article><div style='width: 500px'>x</div><img src='missing.png'></article>"
    )
    phone.get(page.as_uri())
    over, found = phone.execute_script(LOOK)
    assert over == pytest.approx(100, abs=20) and "<div" in found[0]
