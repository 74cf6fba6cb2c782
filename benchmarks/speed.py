"""Saving and loading, side by side: ckptkit, its peers and the floors."""

from __future__ import annotations

from pathlib import Path

from benchmarks.job import Job
from benchmarks.state import llama, total_bytes
from benchmarks.table import Bar, Section, speed_columns, speeds

DCP_LIMIT = {1: 2.5, 2: 1.8}

_COLD_NOTE = (
    "Before each load the system forgets what it has of the files (fsync, POSIX_FADV_DONTNEED). "
    "The disk of a virtual machine may have caches of its own."
)
_HOSTS = ("light", "torch")
_SAVE_NOTES = (
    "Durable (fsync, and a commit where the format has one) unless a row says otherwise.",
    "safetensors and torch.save neither sync nor commit; their files fit this layout only.",
)
_LOAD_NOTES = (
    "Only ckptkit checks what it reads. Each result was once compared with what had been saved.",
)


def save(folder: Path, gib: float, repeat: int, world_size: int) -> Section:
    """A durable save of the whole state by so many processes."""
    tensors = llama(gib)
    with Job(folder / "job", _HOSTS, world_size, tensors) as job:
        measured = job.saves(job.savers(), repeat)
    floor, shown = measured.with_best("write floor")
    best, ours, dcp = (measured.median(name) for name in (floor, "ckptkit", "DCP"))
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    size = total_bytes(tensors)
    return Section(
        f"Save, {processes}: {size / 1e9:.2f} GB, {len(tensors)} tensors",
        speed_columns(floor),
        speeds(shown, size, floor),
        [
            Bar(f"durable save, {processes}: speed / O_DIRECT floor", best / ours, 0.85),
            Bar(f"durable save, {processes}: speed / DCP", dcp / ours, DCP_LIMIT[world_size]),
        ],
        _SAVE_NOTES,
        measured.seconds,
        measured.cpu,
    )


def load(
    folder: Path, gib: float, repeat: int, world_size: int, *, is_cold: bool = False
) -> Section:
    """A load of everything into existing buffers, from the page cache or from the device."""
    tensors = llama(gib)
    with Job(folder / "job", _HOSTS, world_size, tensors) as job:
        measured = job.loads(job.loaders(is_cold=is_cold), repeat, is_cold=is_cold)
    floor, shown = measured.with_best("read floor")
    best, dcp = measured.median(floor), measured.median("DCP")
    checked, unchecked = measured.median("ckptkit"), measured.median("ckptkit, unchecked")
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    how, beside = ("cold", "device") if is_cold else ("warm", "preadv floor")
    least, beats = (0.9, 1) if is_cold else (0.75, 4)
    bars = [
        Bar(f"{how} load, {processes}: unchecked speed / {beside}", best / unchecked, 0.9),
        Bar(f"{how} load, {processes}: CRC-checked speed / {beside}", best / checked, least),
    ]
    if world_size == 1:
        bars.append(Bar(f"{how} load, {processes}: CRC-checked speed / DCP", dcp / checked, beats))
    size = total_bytes(tensors)
    return Section(
        f"Load {how} into existing buffers, {processes}: {size / 1e9:.2f} GB",
        speed_columns(floor),
        speeds(shown, size, floor),
        bars,
        (*_LOAD_NOTES, _COLD_NOTE) if is_cold else _LOAD_NOTES,
        measured.seconds,
        measured.cpu,
    )
