"""Checkpoints of other programs: made ours and theirs, loaded by a job, shown."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import ckptkit
from benchmarks.job import Job, in_turn
from benchmarks.measured import Measured, Taken, taken_by
from benchmarks.memory import peak_mib, reset_peak, resident_mib
from benchmarks.ranks import Ranks, isolated
from benchmarks.reshard import converted, copied, cpu_seconds, warmed
from benchmarks.state import Tensor, llama, total_bytes
from benchmarks.table import Bar, Section, speed_columns, speeds
from benchmarks.zero3 import RANKS
from tests.foreign.frameworks.written import PYTHON

_TURNS = 5
_EXPORT, _COPY, _PEER, _ZERO = (
    "ckpt export",
    "cp -r && sync",
    "dcp_to_torch_save",
    "zero_to_fp32.py",
)
_RESULT_COPIED = "cp -r && sync of the result"
_OURS, _DCP = "hf: ckptkit", "hf: DCP"
_LOADERS = (_OURS, _DCP, f"{_DCP}, thread_count=2")
_SHOWN = 10_000
_TRIAL_GIB, _TRIAL_SHRINK = 0.5, 8

_EXPORT_NOTE = (
    "A process of its own each, starting included; the source is in the page cache. The folder of "
    "ckptkit is durable, and checked against the metadata; the file of dcp_to_torch_save is not "
    "synced, and was in memory whole. Growth is that of a process which has imported ckptkit and "
    "calls `ckptkit.export`."
)
_ZERO_NOTE = (
    "A process of its own each, starting included. What DeepSpeed writes is not synced; the others "
    "are, so that they cannot be faster than the disk."
)
_LOAD_NOTE = (
    "In place, from the page cache, opening included: all ranks read the headers of all files. "
    "Each result was once compared with what had been written. The floor reads as many bytes as "
    "a rank needs from a file that has nothing else. Bytes are what the device gives both ranks "
    "where nothing is in the page cache."
)
_WIDE_NOTE = (
    "Rows are as long as those of Llama 3.1 405B, and an eighth as many. So a rank needs 16 and 52 "
    "KiB of each row of what is cut by columns, of Llama 2 7B 4 and 11. The rest of such rows is "
    "what the other rank needs, so both read them through the page cache."
)


def benches(folder: Path, gib: float, repeat: int) -> Iterator[Callable[[], Section]]:
    """All of it, 5 turns at least."""
    repeat = max(_TURNS, repeat)
    narrower = _TRIAL_SHRINK if gib < _TRIAL_GIB else 1
    usual = _parameters(1.75 * gib, narrower)
    yield partial(export, folder, usual, repeat)
    wide = _wide(narrower)
    for strategy, tensors, width, notes in (
        ("fsdp", usual, "Llama 2 7B", (_LOAD_NOTE,)),
        ("tp", wide, "Llama 3.1 405B", (_LOAD_NOTE, _WIDE_NOTE)),
        ("tp", usual, "Llama 2 7B", (_LOAD_NOTE,)),
    ):
        yield partial(_load, folder, strategy, tensors, width, notes, repeat)
    yield partial(show, folder, repeat)
    if PYTHON:
        yield partial(zero, folder, PYTHON, (16, 4096 // narrower), repeat)


def export(folder: Path, tensors: list[Tensor], repeat: int) -> Section:
    """What eight ranks wrote with DCP, as a Hugging Face folder."""
    size = total_bytes(tensors)
    origin, result = folder / "from", folder / "to"
    origin.mkdir()
    ranks = Ranks("torch", 8, tensors)
    ranks.timed("DCP", "save", origin)
    ranks.close()
    origin /= "dcp"
    ways: dict[str, Callable[[], object]] = {
        _EXPORT: lambda: _quietly([*_export_of(origin), str(result / "hf")]),
        _COPY: lambda: copied(origin, result / "copy"),
        _PEER: lambda: isolated(converted, origin, result / "state.pt"),
    }
    result.mkdir()
    growth = isolated(_exported, origin, result / "hf")
    if not ckptkit.diff(origin, result / "hf").same:
        raise RuntimeError("what was exported is not what was saved")
    measured = _by_turns(ways, origin, result, repeat)
    shutil.rmtree(origin)
    ours = measured.median(_EXPORT)
    what = "DCP fsdp:8 → Hugging Face"
    return Section(
        f"{what}: {size / 1e9:.2f} GB",
        speed_columns(_COPY),
        speeds(measured, size, _COPY),
        [
            Bar(f"{what}: time / {_COPY}", ours / measured.median(_COPY), 1.2, at_least=False),
            Bar(f"{what}: speed / {_PEER}", measured.median(_PEER) / ours, 8),
            Bar(f"{what}: growth of memory", growth, 256, at_least=False, unit="MiB"),
        ],
        [_EXPORT_NOTE],
        measured.seconds,
        measured.cpu,
    )


def _load(
    folder: Path,
    strategy: str,
    tensors: list[Tensor],
    width: str,
    notes: tuple[str, ...],
    repeat: int,
) -> Section:
    """A Hugging Face folder into a model on two ranks."""
    with Job(folder / strategy, [f"{strategy}, model"], 2, tensors) as job:
        names = [*_LOADERS, *(name for name in job.loaders() if "read floor" in name)]
        measured = job.loads(names, repeat)
        job.ask(_OURS, "save")
        needed = sum(job.ask(_OURS, "needed_bytes").results)
        cold = [job.ask_cold(_OURS, "read_bytes") for _ in range(repeat)]
        theirs = [job.ask_cold(_DCP, "read_bytes") for _ in range(repeat)]
        alone = sum(job.ask_cold(_OURS, "read_bytes_apart").results) / needed
    floor, shown = measured.with_best("read floor")
    best, ours = measured.median(floor), measured.median(_OURS)
    peer = min(measured.median(name) for name in _LOADERS if name != _OURS)
    ratio = median(sum(each.results) for each in cold) / needed
    seconds, others = (median(each.seconds for each in some) for some in (cold, theirs))
    size = total_bytes(tensors)
    what = f"load of a Hugging Face folder, {strategy}:2, as wide as {width}"
    return Section(
        f"Hugging Face → {strategy}:2, {size / 1e9:.2f} GB as wide as {width}",
        speed_columns(floor),
        speeds(shown, size, floor),
        [
            Bar(f"{what}: speed / preadv floor", best / ours, 0.8),
            Bar(f"{what}: speed / HuggingFaceStorageReader", peer / ours, 3),
            Bar(f"{what}: bytes read / needed", ratio, 1.05, at_least=False),
        ],
        [
            *notes,
            f"Cold: {seconds:.2f} s, DCP's reader {others:.2f} s.",
            f"Bytes / needed: {ratio:.3f}; were each rank alone on its machine {alone:.3f}.",
        ],
        measured.seconds,
        measured.cpu,
    )


def show(folder: Path, repeat: int) -> Section:
    """What is in a DCP folder of many tensors."""
    place = folder / "many"
    isolated(_many, place)
    line = [str(Path(sys.executable).with_name("ckpt")), "show", str(place)]
    measured = Measured()
    for turn in range(repeat + 1):
        taken = taken_by(line)
        if turn:  # the first one reads the files from the disk
            measured.add("ckpt show", taken)
    shutil.rmtree(place)
    seconds, what = measured.seconds["ckpt show"], f"ckpt show of DCP, {_SHOWN:,} tensors"
    times = [min(seconds), measured.median("ckpt show"), max(seconds)]
    cpu = measured.median_cpu("ckpt show")
    return Section(
        f"A DCP folder of {_SHOWN:,} tensors",
        ["", "min s", "median s", "max s", "CPU s"],
        [["ckpt show", *(f"{each:.2f}" for each in (*times, cpu))]],
        [Bar(what, times[1], 1.5, at_least=False, unit="s")],
        samples=measured.seconds,
        cpu=measured.cpu,
    )


def zero(folder: Path, python: str, sizes: tuple[int, int], repeat: int) -> Section:
    """A checkpoint of DeepSpeed's ZeRO-3 as a Hugging Face folder; `python` has DeepSpeed."""
    origin, result = folder / "zero", folder / "to"
    script = Path(__file__).with_name("zero3.py")
    _quietly([python, str(script), str(origin), *map(str, sizes)])
    line = [python, str(origin / "zero_to_fp32.py"), str(origin), str(result / "theirs")]
    floor = folder / "floor"
    ways: dict[str, Callable[[], object]] = {
        _EXPORT: lambda: _quietly([*_export_of(origin), str(result / "hf")]),
        _RESULT_COPIED: lambda: copied(floor, result / "copy"),
        _ZERO: lambda: _quietly([*line, "--safe_serialization"]),
    }
    result.mkdir()
    growth = isolated(_exported, origin, floor)
    ways[_ZERO]()
    if not ckptkit.diff(floor, result / "theirs").same:
        raise RuntimeError("what was exported is not what DeepSpeed makes of it")
    with ckptkit.open(floor) as found:
        size = sum(array.nbytes for array in found.arrays.values())
    measured = _by_turns(ways, origin, result, repeat)
    shutil.rmtree(origin)
    shutil.rmtree(floor)
    what, ours = "DeepSpeed ZeRO-3 → Hugging Face", measured.median(_EXPORT)
    return Section(
        f"{what}: {size / 1e9:.2f} GB of fp32, {RANKS} ranks",
        speed_columns(_ZERO),
        speeds(measured, size, _ZERO),
        [
            Bar(f"{what}: speed / {_ZERO}", measured.median(_ZERO) / ours, 5),
            Bar(f"{what}: growth of memory", growth, 256, at_least=False, unit="MiB"),
        ],
        [_ZERO_NOTE],
        measured.seconds,
        measured.cpu,
    )


def _by_turns(
    ways: Mapping[str, Callable[[], object]], origin: Path, result: Path, repeat: int
) -> Measured:
    """What each way of making `result` of `origin` takes."""
    measured = Measured()
    for turn in range(repeat):
        for name in in_turn(list(ways), turn):
            shutil.rmtree(result, ignore_errors=True)
            result.mkdir()
            os.sync()
            warmed(origin)
            start, cpu = time.monotonic(), cpu_seconds()
            ways[name]()
            measured.add(name, Taken(time.monotonic() - start, cpu_seconds() - cpu, []))
    shutil.rmtree(result)
    return measured


def _export_of(origin: Path) -> list[str]:
    ckpt = Path(sys.executable).with_name("ckpt")
    return [str(ckpt), "export", "--to-format", "hf", str(origin)]


def _quietly(line: Sequence[str]) -> None:
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _parameters(gib: float, narrower: int) -> list[Tensor]:
    """Those of a model of at least so many GiB of bf16."""
    return [tensor for tensor in llama(5 * gib, narrower) if tensor.of is None]


def _wide(narrower: int) -> list[Tensor]:
    """Two layers with the rows of Llama 3.1 405B."""
    hidden, ffn = 16384 // narrower, 53248 // narrower
    shapes = {"embed_tokens": (4096, hidden), "norm": (hidden,)}
    for number in range(2):
        layer = {
            "self_attn.q_proj": (hidden // 8, hidden),
            "self_attn.k_proj": (1024 // 8, hidden),
            "self_attn.v_proj": (1024 // 8, hidden),
            "self_attn.o_proj": (hidden // 8, hidden),
            "mlp.gate_proj": (ffn // 8, hidden),
            "mlp.up_proj": (ffn // 8, hidden),
            "mlp.down_proj": (hidden // 8, ffn),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    return [Tensor(f"model/{name}.weight", shape, "bfloat16") for name, shape in shapes.items()]


def _exported(origin: Path, result: Path) -> float:
    """The growth of the process in MiB."""
    gc.collect()
    before = resident_mib()
    reset_peak()
    ckptkit.export(origin, result, to_format="hf")
    grown = peak_mib() - before
    if "torch" in sys.modules:
        raise RuntimeError("an export has imported torch")
    return grown


def _many(place: Path) -> None:
    import torch  # noqa: PLC0415
    from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415

    state = {f"layers.{n // 8}.{n % 8}.weight": torch.ones(8, 8) for n in range(_SHOWN)}
    save({"model": state}, checkpoint_id=place, no_dist=True)
