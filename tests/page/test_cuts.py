"""The page computes the boxes of ranks by itself: they are those of `model.layout`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ckptkit.model import Strategy, layout_of, parse_placement, placement_to_doc
from ckptkit.page import page_of
from tests.page.browser import Browser
from tests.page.facts import no_facts

CASES: list[tuple[tuple[int, ...], str, list[str]]] = [
    ((), "single", []),
    ((), "ddp:2", ["replicate"]),
    ((10, 3), "fsdp:4", ["shard(0)"]),
    ((3, 2), "fsdp:8", ["shard(0)"]),
    ((0, 5), "fsdp:2", ["shard(0)"]),
    ((7, 11, 5), "ddp:2,fsdp:3", ["replicate", "shard(1)"]),
    ((24, 8), "tp:2,fsdp:3", ["shard(0)", "shard(0)"]),
    ((13, 6), "fsdp:3,tp:2", ["strided(0)", "shard(0)"]),
    ((13, 6), "fsdp:2,sp=tp:2,tp:3", ["strided(0)", "shard(0)", "shard(0)"]),
    ((32, 4), "tp:4", ["shard(0, blocks=[16,8,8], unit=2)"]),
    ((32, 4), "tp:8", ["shard(0, blocks=[16,8,8], unit=4)"]),  # some hold the same, some do not
    ((48, 4), "tp:4,fsdp:2", ["shard(0, blocks=[32,8,8], unit=8)", "shard(0)"]),
    ((16, 4), "tp:8", ["shard(0, unit=4)"]),
    ((5, 6), "zero1:4", ["owner(2)"]),
    ((6, 5, 4), "pp:2,ep:3,tp:2", ["stage(1)", "shard(0)", "shard(2)"]),
    ((6, 5, 4, 3), "pp:2,ddp:2,ep:3,tp:2", ["stage(0)", "replicate", "shard(0)", "shard(3)"]),
]

SCRIPT = """
(({shape, axes, placements}) => {
  const layout = new Layout(shape, axes, placements);
  const plane = { layout, holders: Plane.prototype.holders };
  const ranks = [];
  for (let rank = 0; rank < layout.world; rank += 1) {
    const part = layout.part(rank);
    const same = part.boxes && part.size ? plane.holders(coordsOf(layout.sizes, rank)) : 0;
    ranks.push([part.shape, part.size, boxesOf(part, 1e6), same]);
  }
  const sizes = new Float64Array(layout.world);
  layout.addSizes(sizes, 1);
  return { ranks, parts: layout.parts, first: layout.firstRank, sizes: [...sizes] };
})
"""


def test_a_rank_holds_the_same_boxes_in_the_page(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(page_of(no_facts()), encoding="utf-8")
    browser.open(page)
    for shape, text, cuts in CASES:
        strategy, placements = Strategy.parse(text), [parse_placement(cut) for cut in cuts]
        layout = layout_of(shape, strategy, placements)
        given = {
            "shape": shape,
            "axes": [[axis.name, axis.kind, axis.size] for axis in strategy.mesh.axes],
            "placements": [placement_to_doc(placement) for placement in placements],
        }
        found: dict[str, Any] = browser.run(f"({SCRIPT})({json.dumps(given)})")
        assert found["parts"] == sum(1 for _ in layout.distinct_ranks()), (shape, text, cuts)
        assert found["first"] == layout.first_rank
        for rank in range(strategy.world_size):
            part = layout.part(rank)
            boxes = [
                [[a, a + n] for a, n in zip(box.offset, box.shape, strict=True)]
                for box in part.boxes
            ]
            size = sum(box.size for box in part.boxes)
            same = layout.replicas(rank).count if size else 0
            assert found["ranks"][rank] == [list(part.shape), size, boxes, same], (cuts, rank)
            assert found["sizes"][rank] == size
