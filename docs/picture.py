"""The picture of a step in README: `python docs/picture.py` writes docs/step.svg again.

A page may be light or dark, and an image cannot know which. So it has a light ground of its own.
"""

from __future__ import annotations

from pathlib import Path

PICTURE = Path(__file__).with_name("step.svg")
WIDTH, HEIGHT = 880, 330
COLOURS = ("#9ec5f4", "#a8dcb5", "#f6cf8b", "#e6b3d3")  # of ranks; dark text is readable on each
INK, SOFT, GROUND = "#1f2328", "#59636e", "#ffffff"
SANS, MONO = "Helvetica, Arial, sans-serif", "Menlo, Consolas, monospace"
COLUMNS = 4  # chunks side by side in the part of a rank


def text(x: int, y: int, words: str, *, size: int = 14, ink: str = INK, font: str = SANS) -> str:
    """Words that begin at a point."""
    style = f'font-family="{font}" font-size="{size}" fill="{ink}"'
    return f'<text x="{x}" y="{y}" {style}>{words}</text>'


def box(x: int, y: int, width: int, height: int, fill: str, edge: str = INK) -> str:
    """A rectangle."""
    size = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    return f'<rect {size} fill="{fill}" stroke="{edge}"/>'


def arrow(x: int, y: int, to: int) -> str:
    """A level line with a head."""
    line = f'<path d="M{x} {y}H{to - 8}" stroke="{INK}" fill="none"/>'
    return line + f'<path d="M{to} {y}l-9 -4v8z" fill="{INK}"/>'


def picture() -> str:
    """Four ranks, the chunks of one tensor, and the files of the step."""
    drawn = [
        box(0, 0, WIDTH, HEIGHT, GROUND, GROUND),
        text(20, 34, "ranks (fsdp:4)", size=16),
        text(240, 34, "one tensor: a Zarr array", size=16),
        text(520, 34, "the step on the disk", size=16),
        text(520, 62, "runs/7b/step-0000001000/", font=MONO),
    ]
    for rank, colour in enumerate(COLOURS):
        y = 80 + 44 * rank
        drawn += [
            box(20, y, 110, 36, colour),
            text(46, y + 23, f"rank {rank}"),
            arrow(138, y + 18, 232),
            *(box(240 + 48 * column, y, 48, 36, colour) for column in range(COLUMNS)),
            arrow(440, y + 18, 512),
            box(520, y, 340, 36, colour),
            text(532, y + 23, f"data/&lt;save-id&gt;/rank-{rank:05d}.zip", font=MONO),
        ]
    drawn += [
        box(520, 264, 340, 36, GROUND),
        text(532, 287, "manifest.msgpack", font=MONO),
        text(680, 287, "written last: it commits", size=13),
        text(240, 287, "a chunk has one writer and a CRC-32", size=13, ink=SOFT),
        text(20, 287, "each holds a part", size=13, ink=SOFT),
        text(520, 320, "a pack for each rank: its chunks of all tensors", size=13, ink=SOFT),
    ]
    told = (
        "Each rank writes its chunks into one pack; the manifest, written last, commits the step."
    )
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{told}</title>\n'
    return head + "\n".join(drawn) + "\n</svg>\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
