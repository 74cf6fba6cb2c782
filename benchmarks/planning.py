"""Planning reshards of 405 billion parameters: shapes only, at four sizes of job."""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.memory import peak_mib, reset_peak, resident_mib
from benchmarks.ranks import isolated
from benchmarks.reshard import RULES
from benchmarks.table import Bar, Section
from ckptkit.checkpoint.reshard.target import ReshardOptions, cost_of, target_of
from ckptkit.format.arrays import ArrayInfo, ArrayKind
from ckptkit.format.manifest import Manifest
from ckptkit.format.record import SaveInfo
from ckptkit.model import DType, Rules, Strategy, layout_of
from ckptkit.plan.chunks import choose_grid
from ckptkit.plan.cuts import Tensor
from ckptkit.plan.place import place

HIDDEN, FFN, KV, VOCAB, LAYERS = 16384, 53248, 1024, 128256, 126
BATCH_BYTES, PART_BYTES = 64 << 20, 16 << 20
WAYS = (
    ("fsdp:128", "tp:8"),
    ("fsdp:256", "tp:8,pp:2"),
    ("fsdp:512", "tp:8,pp:8"),
    ("fsdp:1024", "tp:8,pp:16"),
    ("fsdp:512,tp:8", "fsdp:64"),
    ("fsdp:1024,tp:8", "fsdp:128"),
    ("fsdp:2048,tp:8", "fsdp:256"),
    ("fsdp:4096,tp:8", "fsdp:512"),
)
BARS = (3, 7)


def planning() -> Section:
    """Time and memory of a plan, and what the plan says."""
    rows, bars = [], []
    for number, (source, to) in enumerate(WAYS):
        chunks, cost, seconds, grown, files = isolated(_planned, source, to)
        rows.append(
            [
                f"{source} → {to}",
                f"{chunks / 1e6:.2f}",
                f"{seconds:.2f}",
                f"{grown:.0f}",
                str(files),
                f"{24 * cost.chunks / 1e6:.0f}",
                f"{cost.requests / 1e6:.2f}",
                f"{sum(-(-size // PART_BYTES) for size in cost.bytes_by_rank) / 1e3:.0f}",
                f"{cost.bytes_read / max(1, cost.bytes_needed):.2f}",
                f"{max(cost.bytes_by_rank) / 1e9:.1f}",
            ]
        )
        if number in BARS:
            what = f"plan of {source} → {to}"
            bars.append(Bar(f"{what}: time", seconds, 10, at_least=False, unit="s"))
            bars.append(Bar(f"{what}: memory", grown, 1024, at_least=False, unit="MiB"))
    columns = [
        "405B, bf16 + 2 fp32 moments",
        "chunks of the source, M",
        "s",
        "MiB",
        "files",
        "manifest, MB",
        "GETs, M",
        "parts PUT, k",
        "bytes read / needed",
        "largest pack, GB",
    ]
    return Section("Planning a reshard of 405B parameters", columns, rows, bars)


def _planned(source: str, to: str) -> tuple[int, Any, float, float, int]:
    # Of a manifest all but its chunks, of which planning looks at none.
    parts = {"save": _save_info(source), "arrays": _arrays(Strategy.parse(source))}
    step = cast("Manifest", SimpleNamespace(**parts, aliases=(), objects=()))
    gc.collect()
    reset_peak()
    before, start = resident_mib(), time.monotonic()
    rules = Rules.from_doc(RULES, where="rules")
    target = target_of(step, ReshardOptions(to=to, rules=rules))
    cost = cost_of(target, BATCH_BYTES)
    seconds, grown = time.monotonic() - start, peak_mib() - before
    chunks = sum(array.grid.chunk_count for array in step.arrays)
    return chunks, cost, seconds, grown, target.world_size + 1


def _save_info(strategy: str) -> SaveInfo:
    known = Strategy.parse(strategy)
    return SaveInfo("20260101T000000Z-0123456789ab", 1, 0.0, "", known.world_size, known, {})


def _arrays(strategy: Strategy) -> tuple[ArrayInfo, ...]:
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, HIDDEN), "norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "attention.wq": (HIDDEN, HIDDEN),
                "attention.wk": (KV, HIDDEN),
                "attention.wv": (KV, HIDDEN),
                "attention.wo": (HIDDEN, HIDDEN),
                "ffn.gate": (FFN, HIDDEN),
                "ffn.up": (FFN, HIDDEN),
                "ffn.down": (HIDDEN, FFN),
                "attention.norm": (HIDDEN,),
                "ffn.norm": (HIDDEN,),
            }.items()
        }
    arrays = [(f"model/{name}", shape, "bfloat16", "param", None) for name, shape in shapes.items()]
    for name, shape in shapes.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            path = f"optimizer/{name}/{moment}"
            arrays.append((path, shape, "float32", "optimizer", f"model/{name}"))  # type: ignore[arg-type]
    facts = [Tensor(n, s, DType.of(d).itemsize, role, of, ()) for n, s, d, role, of in arrays]
    rules = Rules.from_doc(RULES, where="rules")
    placed = place(facts, source=Strategy.parse("single"), target=strategy, rules=rules)
    rows = {each.name: each.placements for each in placed}
    found = []
    for name, shape, dtype, role, of in sorted(arrays):
        known = DType.of(dtype)
        layout = layout_of(shape, strategy, rows[name])
        grid = choose_grid(shape, known.itemsize, layout.edges)
        found.append(ArrayInfo(name, ArrayKind(shape, known, grid, role, rows[name]), of))
    return tuple(found)
