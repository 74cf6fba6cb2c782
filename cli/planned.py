"""A plan of a reshard, as it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptkit.cli.output import aligned, counted
from ckptkit.cli.quantity import size_text

import ckptkit

_SHOWN = 12


def document_of(plan: ckptkit.ReshardPlan) -> dict[str, Any]:
    """A plan for programs."""
    return {
        "source": plan.source,
        "destination": plan.destination,
        "step": plan.step,
        "from": plan.from_strategy,
        "to": plan.to_strategy,
        "save_id": plan.save_id,
        "arrays": [
            {
                "name": a.name,
                "source": a.source.name,
                "shape": list(a.info.shape),
                "dtype": a.info.dtype.name,
                "source_dtype": a.source.dtype.name,
                "placements": list(map(str, a.info.placements)),
                "why": a.why,
                "bytes": a.info.nbytes,
                "chunks_kept": a.is_kept,
            }
            for a in plan.arrays
        ],
        "aliases": list(plan.aliases),
        "left_out": list(plan.left_out),
        "bytes_read": plan.bytes_read,
        "bytes_written": plan.bytes_written,
        "read_amplification": plan.read_amplification,
        "requests": plan.requests,
        "chunks": plan.chunks,
        "files": plan.files,
        "manifest_bytes": plan.manifest_bytes,
        "bytes_by_rank": list(plan.bytes_by_rank),
        "imbalance": plan.imbalance,
        "memory": plan.memory,
        "workers": plan.workers,
        "finished_packs": list(plan.finished),
        "seconds": plan.seconds,
    }


def lines_of(plan: ckptkit.ReshardPlan) -> list[str]:
    """A plan for people."""
    read = f"{size_text(plan.bytes_read)}, {plan.read_amplification:.2f} times each byte"
    files = f"{counted(plan.files, 'file')}, {counted(plan.chunks, 'chunk')}"
    rows = [
        ("from", f"{plan.source}, {plan.from_strategy}"),
        ("to", f"{plan.destination}, {plan.to_strategy}"),
        ("arrays", _arrays(plan)),
        ("read", f"{read}, at most {counted(plan.requests, 'request')}"),
        ("write", f"{size_text(plan.bytes_written)} in {files}"),
        ("packs", _packs(plan)),
        ("memory", f"at most {size_text(plan.memory)}, {counted(plan.workers, 'worker')}"),
    ]
    if plan.seconds is not None:
        rows.append(("time", f"about {plan.seconds:.1f} s, by a short probe"))
    if plan.finished:
        rows.append(("there", f"{counted(len(plan.finished), 'pack')} of an earlier run"))
    lines = aligned(rows)
    changed = [a for a in plan.arrays if a.name != a.source.name or a.info.dtype != a.source.dtype]
    if changed:
        lines += ["", "changed on the way:", *_some([_change(array) for array in changed])]
    if plan.left_out:
        lines += ["", "left out:", *_some(list(plan.left_out))]
    return lines


def _packs(plan: ckptkit.ReshardPlan) -> str:
    sizes = plan.bytes_by_rank
    return (
        f"{size_text(min(sizes))} to {size_text(max(sizes))}, "
        f"the largest {plan.imbalance:.2f} times the mean"
    )


def _arrays(plan: ckptkit.ReshardPlan) -> str:
    kept = sum(array.is_kept for array in plan.arrays)
    left = f", {len(plan.left_out)} left out" if plan.left_out else ""
    return f"{len(plan.arrays) + len(plan.aliases)}, chunks of {kept} go over as they are{left}"


def _change(array: Any) -> str:
    source, info = array.source, array.info
    dtype = "" if info.dtype == source.dtype else f" {source.dtype.name} -> {info.dtype.name}"
    return f"{info.name if info.name == source.name else f'{source.name} -> {info.name}'}{dtype}"


def _some(lines: Sequence[str]) -> list[str]:
    shown = [f"  {line}" for line in lines[:_SHOWN]]
    return [*shown, f"  … and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else shown
