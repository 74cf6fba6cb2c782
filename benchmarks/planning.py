"""Planning reshards of 405 billion parameters: shapes only, at four sizes of job."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np

from benchmarks.memory import peak_mib, reset_peak, resident_mib
from benchmarks.ranks import isolated
from benchmarks.reshard import RULES
from benchmarks.table import Bar, Section
from ckptkit.checkpoint.reshard.target import ReshardOptions, cost_of, target_of
from ckptkit.format.array_table import ArrayTable
from ckptkit.format.arrays import ArrayInfo, ArrayKind
from ckptkit.format.manifest import Manifest, PackInfo, SaveInfo, pack_name
from ckptkit.model import DType, Strategy, layout_of
from ckptkit.model.rules import Rules
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
    step = manifest_of(source)
    gc.collect()
    reset_peak()
    before, start = resident_mib(), time.monotonic()
    rules = Rules.from_doc(RULES, where="rules")
    target = target_of(step, ReshardOptions(to=to, rules=rules))
    cost = cost_of(target, BATCH_BYTES)
    seconds, grown = time.monotonic() - start, peak_mib() - before
    chunks = sum(array.grid.chunk_count for array in step.arrays)
    return chunks, cost, seconds, grown, target.world_size + 1


def manifest_of(strategy: str) -> Manifest:
    """Of a step whose chunks lie in the packs of all ranks in turn: no plan looks where."""
    known = Strategy.parse(strategy)
    ranks, table = known.world_size, ArrayTable.of(_arrays(known), ())
    length = table.stored_bytes()
    pack = np.arange(len(length), dtype=np.uint32) % np.uint32(ranks)
    offset = np.zeros_like(length)
    sizes = np.zeros(ranks, np.uint64)
    for rank in range(ranks):
        mine = length[rank::ranks]
        offset[rank::ranks] = np.cumsum(mine) - mine
        sizes[rank] = mine.sum()
    packs = tuple(PackInfo(pack_name(r), int(size), (int(size), 0)) for r, size in enumerate(sizes))
    save = SaveInfo("20260101T000000Z-0123456789ab", 1, 0.0, "", ranks, known, {})
    crc32 = np.zeros(len(length), np.uint32)
    return Manifest(save, packs, table, pack, offset, length, crc32, ())


def _arrays(strategy: Strategy) -> tuple[ArrayInfo, ...]:
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (HIDDEN, HIDDEN),
                "self_attn.k_proj": (KV, HIDDEN),
                "self_attn.v_proj": (KV, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HIDDEN),
                "mlp.gate_proj": (FFN, HIDDEN),
                "mlp.up_proj": (FFN, HIDDEN),
                "mlp.down_proj": (HIDDEN, FFN),
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
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
