"""The documentation site in a real browser: no network, nothing cut off, light and dark, a way on from every page.

Needs the extra `docs`, playwright and a Chromium (`CHROMIUM` names it, else it is looked for); skipped without.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from paths import DOCS, ROOT

pytest.importorskip("playwright", reason="needs playwright: pip install playwright")
pytest.importorskip("material", reason="needs trl-gtr[docs]")

from playwright import sync_api

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium")]

PAGES = sorted(page.stem for page in DOCS.glob("*.md"))
WRONG = """
() => {
  const article = document.querySelector("article");
  const edge = article.getBoundingClientRect().right + 16;  // on a phone, code reaches the edge of the screen
  const scrollable = (e) => /auto|scroll/.test(getComputedStyle(e).overflowX);
  const scrolls = (e) => e !== article && (scrollable(e) || scrolls(e.parentElement));
  const name = (e) => `${e.tagName} ${e.textContent.trim().slice(0, 40)}`;
  const all = [...article.querySelectorAll("*")];
  return {
    "wider than the screen": document.documentElement.scrollWidth > innerWidth ? [document.title] : [],
    "cut off": all.filter((e) => e.getBoundingClientRect().right > edge && !scrolls(e)).map(name),
    "missing picture": [...document.images].filter((e) => e.complete && !e.naturalWidth).map((e) => e.src),
  };
}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    return folder


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def address(site, page: str) -> str:
    return (site / ("" if page == "index" else page) / "index.html").as_uri()


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_cut_off_or_fetched(site, browser, width):
    with browser.new_context(viewport={"width": width, "height": 900}) as context:
        tab, fetched = context.new_page(), []
        tab.on("request", lambda request: fetched.append(request.url))
        found = {}
        for page in PAGES:
            tab.goto(address(site, page))
            found |= {f"{page}: {what}": where for what, where in tab.evaluate(WRONG).items() if where}
    assert not found
    assert fetched
    assert [url for url in fetched if not url.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize(("system", "scheme"), [("light", "default"), ("dark", "slate")])
def test_colours_follow_the_system(site, browser, system, scheme):
    with browser.new_context(color_scheme=system) as context:
        tab = context.new_page()
        tab.goto(address(site, "index"))
        assert tab.get_attribute("body", "data-md-color-scheme") == scheme
        shown = tab.locator("img[src*=report_correction]:visible")
        assert shown.count() == 1
        assert f"_{system}." in (shown.get_attribute("src") or "")


def test_a_wrapped_command_stays_one_command(site, browser):
    with browser.new_context(viewport={"width": 400, "height": 900}) as context:
        tab = context.new_page()
        tab.goto(address(site, "quickstart"))
        code = tab.locator(".language-bash code").first
        assert code.evaluate("e => getComputedStyle(e).whiteSpace") == "pre-wrap"
        assert (code.text_content() or "").strip() == (
            'pip install -c constraints.txt -e ".[report]" && python examples/demo.py'
        )


def test_every_page_leads_to_another(site, browser):
    with browser.new_context() as context:
        tab = context.new_page()
        tab.goto(address(site, "index"))
        seen = ["index"]
        while tab.locator("a.md-footer__link--next").count():
            tab.goto(tab.evaluate("document.querySelector('a.md-footer__link--next').href") + "index.html")
            seen.append(tab.url.split("/")[-2])
    assert sorted(seen) == PAGES
