"""Takes the pictures of "The report": `python docs/assets/shoot_report.py runs/notebook/report.html result curves`.

Needs playwright and a Chromium.
"""

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).parent
# name: what is shown, and how much of its height
PARTS = {
    "result": ("#result", 240),
    "curves": ("#curves", 764),
    "episodes": ("#panes", 1000),
    "correction": ("#panes", 1000),
    "collapse": ("#collapse", 1150),
}


# Open in each pane an episode with a thought that isn't true, at that step.
UNTRUE = """
() => {
  window.scrollTo(0, 0);
  const untrue = (step) => step.judged.some(([, right]) => !right);
  for (const pane of typeof panes === "undefined" ? [] : panes) {
    const index = pane.episodes.findIndex((episode) => episode.steps.some(untrue));
    if (index >= 0) pane.open(index, pane.episodes[index].steps.findIndex(untrue));
  }
}
"""


def shoot(page: Page, selector: str, height: int) -> Image.Image:
    box = page.locator(selector).bounding_box()
    assert box is not None
    clip = {"x": box["x"] - 12, "y": box["y"] - 12, "width": box["width"] + 24}
    clip["height"] = min(height, box["height"] + 24)
    return Image.open(io.BytesIO(page.screenshot(clip=clip, full_page=True))).convert("RGB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}; all if left out")
    args = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 900})
            page.goto(args.report.resolve().as_uri())
            page.add_style_tag(content=".top { position: static !important }")
            page.evaluate(UNTRUE)
            for name in args.parts or PARTS:
                picture = shoot(page, *PARTS[name])
                picture.save(HERE / f"report_{name}_{scheme}.webp", quality=80, method=6)
        browser.close()


if __name__ == "__main__":
    main()
