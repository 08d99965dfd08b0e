"""docs/images/transformer-en.svg and -ko.svg: the paper's figure 1 with this course's chapters on it.

After a change that is meant:  python tools/draw_transformer.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
INK, PAPER, LINE, RED = "#2b2622", "#fbf8f4", "#8a8078", "#c0392b"
FILL = {"embed": "#f6dccb", "attention": "#f3c9a8", "norm": "#f5efc4", "ff": "#cfe3ea", "out": "#dcd6ea"}
LEFT, RIGHT, WIDTH, HEIGHT = 200, 520, 200, 34  # centres of the two columns, size of a box

TEXTS = {
    "en": {
        "title": "The Transformer: encoder on the left, decoder on the right",
        "source": "The dog bit the man", "target": "<bos> 개가 사람을", "next": "물었다",
        "embed": "token vectors × √d", "positions": "+ positions",
        "self": "self-attention", "masked": "causal self-attention", "cross": "cross-attention",
        "norm": "add & norm", "ff": "feed-forward", "linear": "logits (token table)", "softmax": "softmax",
        "encoder": "encoder", "decoder": "decoder", "times": "× 6 layers", "memory": "memory: keys and values",
        "chapter": "ch. {}",
    },
    "ko": {
        "title": "트랜스포머: 왼쪽이 인코더, 오른쪽이 디코더",
        "source": "The dog bit the man", "target": "<bos> 개가 사람을", "next": "물었다",
        "embed": "토큰 벡터 × √d", "positions": "+ 위치",
        "self": "셀프 어텐션", "masked": "인과 셀프 어텐션", "cross": "크로스 어텐션",
        "norm": "더하고 정규화", "ff": "피드포워드", "linear": "로짓(토큰 표)", "softmax": "소프트맥스",
        "encoder": "인코더", "decoder": "디코더", "times": "× 6층", "memory": "메모리: 키와 값",
        "chapter": "{}장",
    },
}  # fmt: skip


class Drawing:
    """SVG elements, from the bottom of the page to its top as the data goes."""

    def __init__(self, words: dict[str, str]) -> None:
        self.words, self.parts = words, list[str]()

    def text(self, x: float, y: float, words: str, size: int = 14, colour: str = INK, anchor: str = "middle") -> None:
        style = f'font-size="{size}" fill="{colour}" text-anchor="{anchor}"'
        self.parts.append(f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>')

    def box(self, x: float, y: float, name: str, kind: str, chapter: str | None = None) -> None:
        """A box with its bottom left out of the reckoning: (x, y) is its centre."""
        left, top = x - WIDTH / 2, y - HEIGHT / 2
        shape = f'x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" rx="7"'
        self.parts.append(f'<rect {shape} fill="{FILL[kind]}" stroke="{LINE}"/>')
        self.text(x, y + 5, self.words[name])
        if chapter is not None:
            side, anchor = (x - 134, "end") if x == LEFT else (x + 134, "start")
            self.text(side, y + 5, self.words["chapter"].format(chapter), 11, RED, anchor)

    def arrow(self, *points: tuple[float, float], head: bool = True) -> None:
        path = " ".join(f"{'ML'[n > 0]}{x} {y}" for n, (x, y) in enumerate(points))
        end = ' marker-end="url(#head)"' if head else ""
        self.parts.append(f'<path d="{path}" fill="none" stroke="{INK}" stroke-width="1.3"{end}/>')

    def frame(self, x: float, top: float, bottom: float, name: str) -> None:
        """The layers that are repeated."""
        shape = f'x="{x - 128}" y="{top}" width="256" height="{bottom - top}" rx="12"'
        self.parts.insert(0, f'<rect {shape} fill="none" stroke="{LINE}" stroke-dasharray="5 4"/>')
        at, anchor = (x - 120, "start") if x == LEFT else (x + 120, "end")
        self.text(at, top - 8, f"{self.words[name]} {self.words['times']}", 12, LINE, anchor)

    def sublayer(self, x: float, y: float, name: str, kind: str, chapter: str) -> None:
        """A box, the norm above it, and the way around."""
        self.box(x, y, name, kind, chapter)
        self.box(x, y - 46, "norm", "norm")
        self.arrow((x, y - HEIGHT / 2), (x, y - 46 + HEIGHT / 2))
        inner = x - WIDTH / 2 - 14 if x == RIGHT else x + WIDTH / 2 + 14
        edge = x - WIDTH / 2 if x == RIGHT else x + WIDTH / 2
        self.arrow((x, y + HEIGHT / 2 + 8), (inner, y + HEIGHT / 2 + 8), (inner, y - 46), (edge, y - 46))

    def svg(self) -> str:
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>'
        )
        family = "font-family=\"'Noto Sans KR', 'Apple SD Gothic Neo', 'Malgun Gothic', system-ui, sans-serif\""
        page = f'<rect width="720" height="700" rx="14" fill="{PAPER}"/>'
        title = f"<title>{escape(self.words['title'])}</title>"
        opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 700" role="img" {family}>'
        return "\n".join([opening, title, head, page, *self.parts, "</svg>", ""])


def draw(language: str) -> str:
    """The figure with its words in one language."""
    made = Drawing(TEXTS[language])
    for x, words in ((LEFT, "source"), (RIGHT, "target")):
        made.text(x, 684, made.words[words], 15)
        made.arrow((x, 668), (x, 652))
        made.box(x, 634, "embed", "embed", "1")
        made.arrow((x, 617), (x, 605))
        made.box(x, 587, "positions", "embed", "1, 3")
    made.arrow((LEFT, 570), (LEFT, 525))
    made.sublayer(LEFT, 507, "self", "attention", "2–4")
    made.arrow((LEFT, 444), (LEFT, 415))
    made.sublayer(LEFT, 397, "ff", "ff", "6")
    made.frame(LEFT, 316, 548, "encoder")
    made.arrow((RIGHT, 570), (RIGHT, 525))
    made.sublayer(RIGHT, 507, "masked", "attention", "3")
    made.arrow((RIGHT, 444), (RIGHT, 400))
    made.sublayer(RIGHT, 382, "cross", "attention", "4")
    made.arrow((RIGHT, 319), (RIGHT, 275))
    made.sublayer(RIGHT, 257, "ff", "ff", "6")
    made.frame(RIGHT, 176, 548, "decoder")
    made.arrow((LEFT, 334), (LEFT, 290), (360, 290), (360, 382), (RIGHT - WIDTH / 2, 382))
    made.text(LEFT - 60, 282, made.words["memory"], 12, LINE, "start")
    made.arrow((RIGHT, 194), (RIGHT, 142))
    made.box(RIGHT, 124, "linear", "out", "6")
    made.arrow((RIGHT, 107), (RIGHT, 87))
    made.box(RIGHT, 69, "softmax", "out", "7")
    made.arrow((RIGHT, 52), (RIGHT, 36))
    made.text(RIGHT, 26, made.words["next"], 15)
    return made.svg()


if __name__ == "__main__":
    for language in TEXTS:
        (IMAGES / f"transformer-{language}.svg").write_text(draw(language), encoding="utf-8")
