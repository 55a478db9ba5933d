"""Draws `loop.svg`, the training loop of "How it works": `python docs/assets/draw_loop.py`."""

from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 960, 500
INK, LINE, PPO, GUIDE = "#1b1f24", "#57606a", "#0b5cb8", "#0f7a4f"
# name: (x, y, width, colour, number of the step, title, second line)
BOXES = {
    "environments": (30, 60, 190, INK, "1", "N environments", "gymnasium, any game"),
    "policy": (380, 60, 200, INK, "1", "VLM policy", "thought, then action"),
    "parse": (740, 60, 190, INK, "1", "Parse the JSON", "spans of both parts"),
    "corrector": (740, 220, 190, GUIDE, "1", "Corrector", "in the background"),
    "buffer": (740, 380, 190, GUIDE, "2", "Correction buffer", "all updates: DAgger"),
    "advantages": (25, 380, 200, PPO, "3", "Score, advantages", "GAE + format reward"),
    "update": (380, 380, 200, INK, "4", "Update", "one optimizer"),
}
BOX_HEIGHT = 70
# from (x, y) by way of … to (x, y): colour, words, where the words stand, and how they are anchored
ARROWS = [
    ([(220, 95), (374, 95)], LINE, "image, prompt", (297, 85), "middle"),
    ([(580, 95), (734, 95)], LINE, "text", (657, 85), "middle"),
    ([(835, 60), (835, 26), (125, 26), (125, 54)], LINE, "action, or a random legal one", (480, 20), "middle"),
    ([(835, 130), (835, 214)], GUIDE, "thought and action", (825, 176), "end"),
    ([(835, 290), (835, 374)], GUIDE, "right thoughts", (825, 336), "end"),
    ([(740, 415), (586, 415)], GUIDE, "thought cloning", (663, 405), "middle"),
    ([(125, 130), (125, 374)], PPO, "rewards, log-probs, values", (135, 256), "start"),
    ([(225, 415), (374, 415)], PPO, "PPO on actions", (297, 405), "middle"),
    ([(480, 380), (480, 136)], LINE, "new weights", (490, 256), "start"),
]


def box(x: int, y: int, width: int, colour: str, number: str, title: str, words: str) -> str:
    middle = x + width / 2
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{BOX_HEIGHT}" rx="10" fill="#fff" stroke="{colour}"'
        ' stroke-width="2"/>'
        f'<circle cx="{x}" cy="{y}" r="13" fill="{colour}"/>'
        f'<text x="{x}" y="{y + 5}" text-anchor="middle" fill="#fff" font-size="14">{number}</text>'
        f'<text x="{middle}" y="{y + 30}" text-anchor="middle" font-size="17" font-weight="600">{escape(title)}</text>'
        f'<text x="{middle}" y="{y + 52}" text-anchor="middle" font-size="14" fill="{LINE}">{escape(words)}</text>'
    )


def arrow(points: list[tuple[int, int]], colour: str, words: str, place: tuple[int, int], anchor: str) -> str:
    path = "M" + " L".join(f"{x} {y}" for x, y in points)
    head = {LINE: "line", PPO: "ppo", GUIDE: "guide"}[colour]
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2" marker-end="url(#{head})"/>'
        f'<text x="{place[0]}" y="{place[1]}" text-anchor="{anchor}" font-size="14" fill="{colour}">'
        f"{escape(words)}</text>"
    )


def draw() -> str:
    heads = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{colour}"/></marker>'
        for name, colour in (("line", LINE), ("ppo", PPO), ("guide", GUIDE))
    )
    title = "The training loop: environments, policy, parser, corrector, buffer, advantages, update"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' font-family="system-ui, Roboto, DejaVu Sans, sans-serif" fill="{INK}"><title>{title}</title>'
        f'<defs>{heads}</defs><rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#fff"/>'
        + "".join(arrow(*entry) for entry in ARROWS)
        + "".join(box(*entry) for entry in BOXES.values())
        + f'<text x="480" y="485" text-anchor="middle" font-size="14" fill="{LINE}">'
        "green: what GTR adds to PPO · 5: log, evaluate, save</text></svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_name("loop.svg").write_text(draw(), "utf-8")
