"""The report's page in a real browser: it loads without errors, keys and filters work, and attacks stay text.

Needs playwright and a Chromium (`CHROMIUM` names it, else it is looked for); skipped without. Screenshots are kept in
the folder that `REPORT_SCREENSHOTS` names.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs playwright: pip install playwright")
pytest.importorskip("jinja2", reason="needs trl-gtr[report]")
pytest.importorskip("matplotlib", reason="needs trl-gtr[report]")

from playwright import sync_api
from report_cases import hostile_rows, write_run

from trl_gtr.report import write_report

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium")]

CONTRAST = """
() => {
  // Contrast (WCAG 2) of every element that has text of its own, against the first opaque background behind it.
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].map((v, i) => (i < 3 ? v : v / 255));
  };
  const luminance = (c) => c.slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const bad = [];
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!text || !element.checkVisibility() || element.closest("svg, .hidden, .skip, [disabled]")) continue;
    let back = [0, 0, 0, 0];
    for (let e = element; e && back[3] < 1; e = e.parentElement) {
      const layer = rgba(getComputedStyle(e).backgroundColor);
      const alpha = back[3] + layer[3] * (1 - back[3]);
      const mixed = (i) => (back[i] * back[3] + layer[i] * layer[3] * (1 - back[3])) / alpha;
      if (alpha > 0) back = [mixed(0), mixed(1), mixed(2), alpha];
    }
    const [a, b] = [luminance(rgba(getComputedStyle(element).color)), luminance(back)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.push(`${element.tagName}.${element.className}: ${ratio.toFixed(2)}`);
  }
  return [...new Set(bad)];
}
"""


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Reports: of one run, of two, and of one that was written by an enemy."""
    folder = tmp_path_factory.mktemp("reports")
    one = write_run(folder / "gtr", updates=8)
    other = write_run(folder / "ppo", updates=8, offset=-0.1)
    enemy = write_run(folder / "enemy", rows=hostile_rows)
    return {
        "one": write_report([one]),
        "two": write_report([one, other], ["gtr", "ppo"], folder / "two.html"),
        "hostile": write_report([enemy]),
        "watched": write_report([one], output=folder / "watched.html", refresh=1),
    }


@pytest.fixture
def open_page(browser, pages):
    """`open_page("one")` → a page on which nothing has gone wrong; that is looked at again in the end."""
    contexts = []

    def open_one(name, scheme="light", width=1280):
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
        page = context.new_page()
        page.problems = []
        page.on("console", lambda message: page.problems.append(message.text))
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("request", lambda request: page.problems.append(request.url) if is_foreign(request.url) else None)
        page.on("dialog", lambda dialog: page.problems.append(dialog.message) or dialog.dismiss())
        page.goto(pages[name].as_uri())
        contexts.append((context, page))
        return page

    yield open_one
    for context, page in contexts:
        assert page.problems == []
        context.close()


def is_foreign(url: str) -> bool:
    return not url.startswith(("file:", "data:"))


def keep(page, name: str) -> None:
    """A screenshot for those who want to look at it."""
    folder = os.environ.get("REPORT_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def captions(page):
    return page.locator(".pane figcaption").all_inner_texts()


def chosen(page):
    return [select.evaluate("s => s.selectedOptions[0].text") for select in page.locator("[data-f=pick]").all()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_loads_in_light_and_dark(open_page, scheme):
    page = open_page("two", scheme)
    assert page.locator("h1").inner_text() == "gtr, ppo"
    assert page.locator(".pane").count() == 2
    assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(16, 20, 26)"}[scheme]
    assert page.evaluate(CONTRAST) == []
    keep(page, f"two_runs_{scheme}")
    other = {"light": "Dark mode", "dark": "Light mode"}[scheme]
    page.get_by_role("button", name=other).click()  # it says what it will do
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != background
    assert page.get_by_role("button", name=f"{scheme} mode").is_visible()
    page.reload()  # as a watched page does by itself: the choice stays
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != background


def test_early_and_late_episodes_stand_side_by_side(open_page):
    page = open_page("one")
    assert captions(page) == ["Update 1, step 1", "Update 7, step 1"]
    lefts = [box["x"] for box in (pane.bounding_box() for pane in page.locator(".pane").all())]
    assert lefts[1] > lefts[0] + 400
    page.get_by_label("two side by side").uncheck()
    assert captions(page) == ["Update 1, step 1"]
    narrow = open_page("one", width=400)
    assert narrow.evaluate("document.documentElement.scrollWidth") <= 400
    keep(narrow, "narrow")


def test_the_same_start_stands_side_by_side(open_page):
    page = open_page("two")

    def pictures():
        return [image.get_attribute("src") for image in page.locator(".pane [data-f=image]").all()]

    assert page.get_by_label("from the same start").is_checked()
    runs = [select.evaluate("s => s.selectedOptions[0].text") for select in page.locator("[data-f=run]").all()]
    assert runs == ["gtr", "ppo"]
    for choice in ("update 8", "update 3"):
        words = next(text for text in page.locator("[data-f=pick]").first.inner_text().split("\n") if choice in text)
        page.locator("[data-f=pick]").first.select_option(words)
        assert [text.split(",")[0] for text in chosen(page)] == [choice, choice]
        assert len({*pictures()}) == 1
    page.get_by_label("from the same start").uncheck()
    page.locator("[data-f=pick]").first.select_option(index=1)
    assert len({*pictures()}) == 2
    page.get_by_label("two side by side").uncheck()
    assert not page.get_by_label("from the same start").is_visible()
    assert not open_page("one").get_by_label("from the same start").is_visible()  # nothing to compare with


def test_a_watched_page_loads_itself_again_when_it_is_left_alone(open_page):
    page = open_page("watched")
    assert "It is loaded again every 1 s" in page.locator("footer").inner_text()
    page.wait_for_event("load", timeout=60_000)


def test_arrow_keys_move(open_page):
    page = open_page("one")
    page.keyboard.press("ArrowRight")  # from anywhere, all panes
    assert captions(page) == ["Update 1, step 2", "Update 7, step 2"]
    assert page.locator("#announce").inner_text().startswith("Update 7, environment 0, step 2 of 2.")
    page.keyboard.press("ArrowRight")  # into the next episode
    assert [words.split(":")[0] for words in chosen(page)] == ["update 1, env 1", "update 7, env 1"]
    page.keyboard.press("ArrowLeft")
    assert captions(page) == ["Update 1, step 2", "Update 7, step 2"]
    page.locator(".pane").first.focus()
    page.keyboard.press("ArrowDown")  # the one that has the focus, an episode on
    page.keyboard.press("ArrowDown")
    assert [words.split(":")[0] for words in chosen(page)] == ["update 2, env 0", "update 7, env 0"]
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")  # nothing before the first
    assert chosen(page)[0].startswith("update 1, env 0")
    page.locator("#outcome").focus()
    page.keyboard.press("ArrowLeft")  # belongs to the list that has the focus
    assert captions(page) == ["Update 1, step 1", "Update 7, step 2"]


def test_filters_filter(open_page):
    page = open_page("one")
    page.get_by_label("two side by side").uncheck()
    count = page.locator("[data-f=count]")
    assert count.inner_text() == "16 of 16 episodes match"
    page.get_by_label("Outcome").select_option("success")
    assert count.inner_text() == "8 of 16 episodes match"
    assert "success" in page.locator(".badges").inner_text()
    page.get_by_label("with an invalid or illegal response").check()
    assert count.inner_text() == "No episode matches these filters."
    assert not page.locator(".pane-body").is_visible()
    page.get_by_label("Outcome").select_option("no success")
    assert count.inner_text() == "8 of 16 episodes match"
    assert captions(page) == ["Update 1, step 2"]  # the step that is illegal
    assert "illegal action" in page.locator(".badges").inner_text()
    assert page.locator(".action").inner_text() == "banana not legal; taken instead: +"
    page.get_by_label("Updates").select_option("update 3")
    assert count.inner_text() == "1 of 16 episodes match"
    page.get_by_label("with an invalid or illegal response").uncheck()
    page.get_by_label("with a corrected thought").check()
    assert page.locator("del").all_inner_texts()[0] == "8"
    assert page.locator("ins").all_inner_texts()[0] == "9"
    assert page.locator("[data-f=diff]").inner_text().startswith("cards: 3, 8 9\n")  # two words, not "89"


def test_an_episode_shows_bars_and_tokens(open_page):
    page = open_page("one")
    pane = page.locator(".pane").first
    page.keyboard.press("ArrowRight")
    assert pane.locator(".bars").inner_text().split() == ["reward", "+10", "value", "+0.25", "advantage", "-0.5"]
    assert pane.locator(".bar .plus").first.bounding_box()["width"] > 50
    tokens = pane.locator(".tokens span")
    assert tokens.count() == 4
    assert [token.get_attribute("class") for token in tokens.all()] == [None, "act", "act", "act"]
    heat = [float(token.evaluate("t => t.style.getPropertyValue('--p')")) for token in tokens.all()]
    assert heat == pytest.approx([0.777, 0.010, 0.181, 0.0], abs=1e-3)  # 1 − p
    # 0.5 · 1.5 of 0.5 · 1.5 + 0.21
    assert "78 % of the response's log-prob lies in the thought" in pane.locator(".mass").inner_text()
    assert not pane.get_by_text("Make 24.").is_visible()
    pane.locator("summary").click()
    assert pane.get_by_text("Make 24.").is_visible()
    keep(page, "episode")


def test_the_pointer_reads_curves(open_page):
    page = open_page("two")
    chart = page.locator("figure.chart").first
    chart.scroll_into_view_if_needed()
    box = chart.locator("svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 12, box["y"] + 50)
    outputs = chart.locator("output").all_inner_texts()
    # two curves, and two evaluations that were made before training
    assert outputs == ["80.0 % at 8", "70.0 %", *["25.0 % (10.0 % to 50.0 %) at 0"] * 2]
    chart.locator("summary").click()
    assert chart.locator("tbody tr").last.inner_text().split() == ["8", "80.0%", "70.0%"]
    assert chart.locator("tbody tr").first.inner_text().split() == ["0", "25.0%", "25.0%"]


def test_everything_can_be_reached_by_keyboard_and_has_a_name(open_page):
    page = open_page("two")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, select, input, a, summary, img")]
            .filter(e => e.checkVisibility() && !e.closest("[hidden]"))
            .filter(e => !(e.getAttribute("aria-label") || e.alt || e.textContent.trim() || e.labels?.length))
            .map(e => e.outerHTML.slice(0, 80))"""
    )
    assert nameless == []
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the episodes"
    assert page.locator("svg[role=img][aria-label]").count() == page.locator("figure.chart").count()


def test_attacks_stay_text(open_page):
    page = open_page("hostile")
    for _ in range(20):
        page.keyboard.press("ArrowRight")
        assert page.evaluate("window.hacked") is None
    assert page.locator("script").count() == 2
    page.get_by_label("two side by side").uncheck()
    assert page.locator(".pane [data-f=thought]").inner_text().startswith("<script>window.hacked = 1</script>")
    assert "{{ 7 * 7 }}" in page.locator(".pane [data-f=thought]").inner_text()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator(".pane [data-f=thought]").inner_text().endswith("(96,000 characters more)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    keep(page, "hostile")
    # and if text did become HTML, its scripts would still not run
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked = 4\">')")
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked = 5'}))")
    page.wait_for_function("performance.now() > 0")
    assert page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in problem for problem in page.problems)
    page.problems.clear()
