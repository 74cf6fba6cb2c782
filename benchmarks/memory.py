"""How much more memory a process needs while it saves than the state it holds."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
from pathlib import Path

from benchmarks.contender import Contender
from benchmarks.ranks import isolated
from benchmarks.state import Part, llama
from benchmarks.table import Bar, Section

LIMIT_MIB = 256

_NAMES = ("ckptkit", "DCP", "DCP, thread_count=2", "safetensors", "torch.save")


def memory(folder: Path, gib: float) -> Section:
    """The first save and load of a fresh process each, so that nothing is in any pool yet."""
    rows, bars = [], []
    for name in _NAMES:
        state, saving, loading = isolated(_peaks, name, folder / "memory", gib)
        rows.append([name, f"{state:.0f}", f"{saving:.0f}", f"{loading:.0f}"])
        if name == "ckptkit":
            what = "memory above the state while saving"
            bars.append(Bar(what, saving, LIMIT_MIB, at_least=False, unit="MiB"))
    return Section(
        "Peak extra memory, 1 process",
        ["", "resident before, MiB", "more while saving, MiB", "more while loading, MiB"],
        rows,
        bars,
        ["Mapped files count as resident: safetensors and torch.load map what they read."],
    )


def _peaks(name: str, folder: Path, gib: float) -> tuple[float, float, float]:
    folder.mkdir()
    contender = _contender(name, Part(llama(gib)))
    gc.collect()
    before = resident_mib()
    reset_peak()
    contender.save(folder)
    saving = peak_mib() - before
    gc.collect()
    loading_from = resident_mib()
    reset_peak()
    contender.load(folder)
    loading = peak_mib() - loading_from
    shutil.rmtree(folder)
    return before, saving, loading


def _contender(name: str, part: Part) -> Contender:
    # Here, so that a process has only what it needs.
    if name == "ckptkit":
        from benchmarks.ours import Ckptkit  # noqa: PLC0415

        return Ckptkit(part)
    from benchmarks import peers  # noqa: PLC0415

    tensors = peers.local_tensors(part)
    if name == "safetensors":
        return peers.Safetensors(tensors, 0)
    if name == "torch.save":
        return peers.TorchSave(tensors, 0)
    return peers.Dcp(tensors, 2 if "2" in name else 1)


def resident_mib() -> float:
    """The resident memory of the process."""
    return _status("VmRSS")


def peak_mib() -> float:
    """The most it was since `reset_peak`."""
    return _status("VmHWM")


def anonymous_mib(process: int | None) -> float:
    """The memory of another process that is its own; none where that has ended."""
    try:
        return _status("RssAnon", process or os.getpid())
    except (FileNotFoundError, StopIteration):
        return 0.0


def give_back() -> None:
    """Let the system have what nobody uses any more, which the allocator keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> None:
    """Start the high-water mark afresh."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _status(name: str, process: int | None = None) -> float:
    lines = Path(f"/proc/{process or os.getpid()}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))
