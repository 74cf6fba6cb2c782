"""Training steps under strategies in one line, and the same engines of torch set up by hand."""

from __future__ import annotations

import multiprocessing as mp
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.by_hand import BY_HAND, MICROBATCHES, Step, layer_by_layer
from benchmarks.networks import Layered, Llama, loss_of, words
from benchmarks.table import Bar, Section
from ckptkit.parallel import as_distributed

_SPAWN = mp.get_context("spawn")
_STEPS = 3
_MIB = 2**20
_RANKS = 4
_SPECS = ("ddp", "zero1", "zero2", "zero3", "ddp:2,fsdp", "tp", "tp:2,fsdp", "pp", "pp:2,fsdp")
_TAKING: dict[str, tuple[str, dict[str, Any]]] = {spec: (spec, {}) for spec in _SPECS}
_TAKING["zero1, overlap"] = ("zero1", {"overlap": True})
_KINDS = ("parameters", "gradients", "optimizer")
_SIZES = (1, 2, 4, 8)
_AFTER = (1, 3, 10, 30, 100, 300)
# By strategy, the kinds of which a rank keeps its share.
_SHARED_OUT = {"zero1": (2,), "zero2": (1, 2), "zero3": (0, 1, 2)}
_NOTE = (
    "Gloo on one machine, one thread to a rank: what is sent costs little more than memory. Sizes "
    "are MiB of the fullest rank after a step."
)

Make = Callable[[], Step]


def benches(repeat: int) -> Iterator[Callable[[], Section]]:
    """All measurements."""
    yield partial(_what_each_takes, repeat)
    yield partial(_by_ranks, repeat)
    yield _rounding
    yield partial(_overhead, repeat)
    yield partial(_grouping, repeat)


class _Counting(TorchDispatchMode):
    """Counts collectives and messages; torch's own counter hooks into each module besides."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func)
        return func(*args, **(kwargs or {}))


def _what_each_takes(repeat: int) -> Section:
    rows = []
    fullest: dict[str, list[float]] = {}
    for name, (spec, options) in _TAKING.items():
        found = _on_ranks(_RANKS, _taken, spec, options, repeat)
        sizes = fullest[name] = [max(r["mib"][kind] for r in found) for kind in range(3)]
        sent = f"{max(r['collectives'] for r in found)}"
        seconds = max(median(r["seconds"]) for r in found)
        rows.append([name, *(f"{size:.1f}" for size in sizes), sent, f"{seconds * 1e3:.0f}"])
    bars = [
        Bar(f"{spec}: {_KINDS[kind]} of a rank × {_RANKS} / ddp", share, 1.1, at_least=False)
        for spec, kinds in _SHARED_OUT.items()
        for kind in kinds
        for share in [_RANKS * fullest[spec][kind] / fullest["ddp"][kind]]
    ]
    columns = ["4 ranks", *_KINDS, "collectives", "ms a step"]
    return Section("Strategies: what each takes, llama-like", columns, rows, bars, [_NOTE])


def _by_ranks(repeat: int) -> Section:
    rows = []
    for spec in ("ddp", "zero1", "zero2", "zero3", "tp", "pp"):
        mib: list[str] = []
        ms: list[str] = []
        for ranks in _SIZES:
            if spec in ("tp", "pp") and ranks > _RANKS:  # there are four heads and four layers
                mib, ms = [*mib, ""], [*ms, ""]
                continue
            found = _on_ranks(ranks, _taken, spec, {}, repeat)
            mib.append(f"{max(sum(r['mib']) for r in found):.1f}")
            ms.append(f"{max(median(r['seconds']) for r in found) * 1e3:.0f}")
        rows.append([spec, *mib, *ms])
    columns = ["ranks", *(f"{n}, MiB" for n in _SIZES), *(f"{n}, ms" for n in _SIZES)]
    note = "MiB of parameters, gradients and optimizer state of the fullest rank; ms of a step."
    return Section("Strategies: by the number of ranks", columns, rows, [], [note, _NOTE])


def _rounding() -> Section:
    """How far parameters are from those of one process, trained on the same batches."""
    rows = []
    for name, make, dtype in (
        ("AdamW, float32", partial(torch.optim.AdamW, lr=0.01), torch.float32),
        ("SGD, float32", partial(torch.optim.SGD, lr=0.01, momentum=0.9), torch.float32),
        ("AdamW, float64", partial(torch.optim.AdamW, lr=0.01), torch.float64),
    ):
        apart = _on_ranks(2, _apart, make, dtype)[0]
        rows += [[f"{name}, {engine}", *far] for engine, far in apart.items()]
    columns = ["2 ranks, after", *(f"{n} step{'s' if n > 1 else ''}" for n in _AFTER)]
    return Section("Strategies: apart from one process", columns, rows, [], [])


def _apart(make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype) -> dict[str, list[str]]:
    alone, by_hand = _small(dtype), DistributedDataParallel(_small(dtype))
    ddp, fsdp = (as_distributed(_small(dtype), spec, optimizer=make) for spec in ("ddp", "fsdp"))
    steps = {
        "torch's DDP": (by_hand, make(by_hand.parameters())),
        "`ddp`": (ddp.model, ddp.optimizer),
        "`fsdp`": (fsdp.model, fsdp.optimizer),
    }
    stepping = make(alone.parameters())
    found: dict[str, list[str]] = {name: [] for name in steps}
    for step in range(1, max(_AFTER) + 1):
        torch.manual_seed(step)
        inputs, targets = torch.randn(2, 16, 8, 32, dtype=dtype)
        for model, optimizer in ((alone, stepping), *steps.values()):
            mine = slice(None) if model is alone else slice(dist.get_rank(), None, 2)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs[mine]), targets[mine]).backward()
            optimizer.step()
        if step in _AFTER:
            for name, (model, _) in steps.items():
                pairs = zip(model.parameters(), alone.parameters(), strict=True)
                far = max(float((_whole(p) - q).detach().abs().max()) for p, q in pairs)
                found[name].append(f"{far:.0e}")
    return found


def _small(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    # Nothing depends on the bias of attention's keys, so that its gradient is rounding alone.
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).to(dtype)


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _overhead(repeat: int) -> Section:
    rows, bars, samples = [], [], dict[str, list[float]]()
    for spec, (ranks, _) in BY_HAND.items():
        makers = {"in one line": partial(_ours, spec), "by hand": partial(_theirs, spec)}
        found = _slowest(_on_ranks(ranks, _in_turns, makers, 3 * repeat))
        samples |= {f"{spec}, {name}": seconds for name, seconds in found.items()}
        ratio = _ratio(found, "in one line", "by hand")
        times = (f"{median(s) * 1e3:.1f}" for s in found.values())
        rows.append([spec, str(ranks), *times, f"{ratio:.3f}"])
        bars.append(Bar(f"as_distributed {spec}: step / by hand", ratio, 1.03, at_least=False))
    columns = ["", "ranks", "in one line, ms", "by hand, ms", "ratio"]
    return Section("Strategies: a step against torch by hand", columns, rows, bars, [], samples)


def _grouping(repeat: int) -> Section:
    makers = {"grouped": _grouped, "layer by layer": layer_by_layer}
    found = _slowest(_on_ranks(2, _in_turns, makers, repeat))
    faster = _ratio(found, "layer by layer", "grouped")
    counts = {n: max(_on_ranks(2, _collectives_of, make)) for n, make in makers.items()}
    fewer = counts["layer by layer"] / counts["grouped"]
    rows = [[n, f"{counts[n]}", f"{median(s) * 1e3:.1f}"] for n, s in found.items()]
    large = {"grouped": partial(_ours, "fsdp"), "alone": partial(_ours, "fsdp", group_below=0)}
    times = _slowest(_on_ranks(2, _in_turns, large, 3 * repeat))
    rows += [[f"llama-like, {n}", "", f"{median(s) * 1e3:.1f}"] for n, s in times.items()]
    slower = _ratio(times, "grouped", "alone")
    bars = [
        Bar("llama-like: step, grouped / layer by layer", slower, 1.05, at_least=False),
        Bar("1,000 layers of 64x64: collectives, layer by layer / grouped", fewer, 10),
        Bar("1,000 layers of 64x64: step, layer by layer / grouped", faster, 2),
    ]
    columns = ["fsdp:2", "collectives", "ms a step"]
    return Section("Strategies: tiny layers", columns, rows, bars, [], found)


def _ours(spec: str, **options: Any) -> Step:
    torch.manual_seed(0)
    made = as_distributed(
        Llama(), spec, optimizer=torch.optim.AdamW, **_options_for(spec), **options
    )
    batch = made.share(words())
    return lambda: float(made.step(loss_of, batch))


def _theirs(spec: str) -> Step:
    torch.manual_seed(0)
    return BY_HAND[spec][1](Llama(), words())


def _options_for(spec: str) -> dict[str, Any]:
    """With an example a model is cut as far as that shows to be right."""
    options: dict[str, Any] = {}
    if "tp" in spec or "pp" in spec:
        options["example"] = words()[0][:1]
    return options | ({"microbatches": MICROBATCHES} if "pp" in spec else {})


def _grouped() -> Step:
    made = as_distributed(Layered(), "fsdp", optimizer=torch.optim.SGD)
    batch = torch.randn(8, 64), torch.randn(8, 64)
    return lambda: float(made.step(nn.functional.mse_loss, batch))


def _taken(spec: str, options: dict[str, Any], repeat: int) -> dict[str, Any]:
    options = {**options, **_options_for(spec)}
    made = as_distributed(Llama(), spec, optimizer=torch.optim.AdamW, **options)
    batch = made.share(words())
    made.step(loss_of, batch)
    seconds = _timed(lambda: float(made.step(loss_of, batch)), repeat)
    memory = made.memory()
    kinds = (memory.parameters, memory.gradients, memory.optimizer)
    found: dict[str, Any] = {"mib": [kind.here / _MIB for kind in kinds], "seconds": seconds}
    with _Counting() as counting:
        made.backward(loss_of, batch)
    return found | {"collectives": counting.found}


def _collectives_of(make: Make) -> int:
    step = make()
    step()
    with _Counting() as counting:
        step()
    return int(counting.found)


def _in_turns(makers: dict[str, Make], repeat: int) -> dict[str, list[float]]:
    steps = {name: make() for name, make in makers.items()}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for turn in range(repeat):
        order = list(steps.items())
        for name, step in order if turn % 2 else order[::-1]:
            found[name] += _timed(step, 1)
    return found


def _timed(step: Step, repeat: int) -> list[float]:
    found = []
    for _ in range(repeat):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(_STEPS):
            step()
        found.append((time.perf_counter() - start) / _STEPS)
    return found


def _slowest(ranks: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {n: [max(each) for each in zip(*(r[n] for r in ranks), strict=True)] for n in ranks[0]}


def _ratio(found: dict[str, list[float]], above: str, below: str) -> float:
    """The median of pairs that were measured one after the other."""
    return median(a / b for a, b in zip(found[above], found[below], strict=True))


def _on_ranks(ranks: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """What a function returns on each rank of a job of its own."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        answers = _SPAWN.Queue()
        processes = [
            _SPAWN.Process(target=_rank, args=(store, rank, ranks, answers, job, args), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        found = dict(answers.get() for _ in processes)
        for process in processes:
            process.join()
    for error in found.values():
        if isinstance(error, Exception):
            raise error
    return [found[rank] for rank in range(ranks)]


def _rank(
    store: str, rank: int, ranks: int, answers: Any, job: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # counting collectives warns of hooks, FSDP of views
    dist.init_process_group("gloo", store=FileStore(store, ranks), rank=rank, world_size=ranks)
    try:
        answers.put((rank, job(*args)))
        dist.barrier()
    except Exception as error:
        answers.put((rank, RuntimeError(repr(error))))
        raise
    finally:
        dist.destroy_process_group()
