"""The page at ``/`` in a real browser: a person types, and watches text stream."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import linexport
from linexport.artifact import Artifact
from tests.support.browser import browser as opened_browser
from tests.support.serving import alone, changed, eventually, served

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]

TOKEN = "0123456789abcdef"
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened_browser() as page:
        yield page


@pytest.fixture(scope="module")
def model(converted: Callable[..., Path]) -> Artifact:
    """A model that takes 50 ms a token, so that its text can be seen to come."""
    return changed(linexport.load(converted("language_model"), threads=1), seconds=0.05)


def field(browser: Any, name: str, value: str) -> None:
    place = browser.find_element(By.ID, name)
    place.clear()
    place.send_keys(value)


def texts(browser: Any) -> list[str]:
    return [e.get_property("textContent") for e in browser.find_elements(By.CSS_SELECTOR, ".words")]


def shown(text: str) -> str:
    """The text as the page has it: control characters are written out."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: f"\\u{ord(m[0]):04x}", text)


def status(browser: Any) -> str:
    return str(browser.find_element(By.ID, "status").text)


def complaints(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser")]


def test_a_person_types_and_watches_text_come(
    browser: Any, model: Artifact, tmp_path: Path
) -> None:
    with served(model) as server:
        browser.get(server.url)
        eventually(lambda: browser.title.startswith("tiny"))
        field(browser, "tokens", "60")
        field(browser, "temperature", "0")
        field(browser, "prompt", "import ")
        browser.find_element(By.ID, "prompt").send_keys(Keys.CONTROL, Keys.ENTER)
        eventually(lambda: len(texts(browser)) == 2 and len(texts(browser)[1]) > 3)
        part = texts(browser)[1]
        eventually(lambda: "60 tokens" in status(browser))
        browser.save_screenshot(str(tmp_path / "page.png"))
        expected = alone(model, b"import ", max_tokens=60)
        assert texts(browser) == ["import ", expected]
        assert part != expected and expected.startswith(part)
        assert complaints(browser) == []


def test_stopping_frees_the_slot_and_keeps_the_text(browser: Any, model: Artifact) -> None:
    with served(model) as server:
        browser.get(server.url)
        eventually(lambda: browser.title.startswith("tiny"))
        field(browser, "tokens", "4000")
        field(browser, "prompt", "x")
        browser.find_element(By.ID, "send").click()
        eventually(lambda: len(texts(browser)) == 2 and texts(browser)[1])
        assert server.engine.sessions == 1
        browser.find_element(By.ID, "stop").click()
        eventually(server.idle)
        eventually(lambda: status(browser) == "Stopped.")
        assert texts(browser)[1]
        browser.find_element(By.ID, "clear").click()
        assert texts(browser) == []


def test_a_conversation_remembers_what_was_said(
    browser: Any, model: Artifact, tmp_path: Path
) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(model.path, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with served(linexport.load(folder, threads=1, verify=False)) as server:
        browser.get(server.url)
        eventually(lambda: "conversation" in browser.find_element(By.ID, "mode").text)
        field(browser, "tokens", "5")
        field(browser, "temperature", "0")
        for said in ("one", "two"):
            field(browser, "prompt", said)
            browser.find_element(By.ID, "send").click()
            eventually(lambda: browser.find_element(By.ID, "send").is_enabled())
        first = alone(model, b"u:one\na:", max_tokens=5)
        second = alone(model, f"u:one\na:{first}\nu:two\na:".encode(), max_tokens=5)
        assert texts(browser) == ["one", shown(first), "two", shown(second)]


def test_a_token_is_asked_for_and_errors_are_shown(browser: Any, model: Artifact) -> None:
    with served(model, token=TOKEN) as server:
        browser.get(server.url)
        eventually(lambda: "bearer token" in status(browser))
        field(browser, "token", TOKEN)
        field(browser, "tokens", "5000")
        field(browser, "prompt", "<b onclick=alert(1)>markup</b>")
        browser.find_element(By.ID, "send").click()
        eventually(lambda: "at most 4096" in status(browser))
        assert texts(browser) == ["<b onclick=alert(1)>markup</b>"]
        assert not browser.find_elements(By.TAG_NAME, "b")


CONTRAST = """
const channel = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number).map(channel);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const behind = (e) => { for (; e; e = e.parentElement) {
  const c = getComputedStyle(e).backgroundColor; if (!c.endsWith(", 0)")) return c; } };
return [...document.querySelectorAll("h1, p, label, button, textarea, input, .who, .words")]
  .filter((e) => e.offsetParent).map((e) => {
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
    return [e.tagName + "#" + e.id, (a + 0.05) / (b + 0.05)]; });
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible_in_light_and_dark(
    browser: Any, model: Artifact, scheme: str
) -> None:
    """Contrast of 4.5 (WCAG AA), a label for every field, nothing wider than a telephone."""
    with served(model) as server:
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        size = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(server.url)
        eventually(lambda: browser.title.startswith("tiny"))
        field(browser, "tokens", "3")
        field(browser, "prompt", "x")
        browser.find_element(By.ID, "send").click()
        eventually(lambda: "3 tokens" in status(browser))
        found = dict(browser.execute_script(CONTRAST))
        assert len(found) > 5 and {n: c for n, c in found.items() if c < 4.5} == {}
        script = (
            "return [...document.querySelectorAll('input, textarea')].map(e => e.labels.length)"
        )
        assert browser.execute_script(script) == [1, 1, 1, 1]
        wide = "return document.documentElement.scrollWidth <= window.innerWidth"
        assert browser.execute_script(wide)
        back = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, back[4:-1].split(","))) < 200) == (scheme == "dark")
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_page_asks_nobody_but_its_server(browser: Any, model: Artifact) -> None:
    with served(model) as server:
        browser.get(server.url)
        eventually(lambda: browser.title.startswith("tiny"))
        script = "return performance.getEntries().map(e => e.name)"
        names = [n for n in browser.execute_script(script) if "://" in n]
        assert names and all(name.startswith(server.url) for name in names), json.dumps(names)
