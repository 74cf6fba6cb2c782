"""The training job of the demo: a tiny transformer on 8 processes, each with its own part."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import ckptkit
from ckptkit.errors import PeerError

STRATEGY = "fsdp:8"
STEPS = (100, 200)
HEAD_DIM = 8
_WRITERS = 8
_DIM, _HIDDEN, _VOCABULARY, _LAYERS = 64, 172, 250, 2
_TIMEOUT = 60.0

# Named as Llama's are, so that the rules of that architecture know them.
_LAYER = {
    "input_layernorm": (_DIM,),
    "self_attn.q_proj": (_DIM, _DIM),
    "self_attn.k_proj": (_DIM // 2, _DIM),
    "self_attn.v_proj": (_DIM // 2, _DIM),
    "self_attn.o_proj": (_DIM, _DIM),
    "mlp.gate_proj": (_HIDDEN, _DIM),
    "mlp.up_proj": (_HIDDEN, _DIM),
    "mlp.down_proj": (_DIM, _HIDDEN),
}


def save_as_a_job(run: Path, meeting: Path) -> None:
    """Write all steps with 8 processes that meet at a folder."""
    ranks = []
    with ExitStack() as stack:
        with uninterrupted():
            for rank in range(_WRITERS):
                command = [sys.executable, "-m", __name__, str(run), str(meeting), str(rank)]
                # In a session of its own, since Ctrl-C is for the one process that answers for all.
                started = subprocess.Popen(  # noqa: S603 - all of it is ours
                    command, stderr=subprocess.PIPE, text=True, start_new_session=True
                )
                process = stack.enter_context(started)
                stack.callback(process.kill)
                ranks.append(process)
        for rank, process in enumerate(ranks):
            _, problem = process.communicate()
            if process.returncode:
                told = problem.strip().rpartition("\n")[2]
                what = f"rank {rank} ended with code {process.returncode}: {told}"
                raise PeerError(what, where=str(run))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C comes after the block: within, it would lose what has begun and nobody holds yet."""
    caught: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught:
        raise KeyboardInterrupt


def save_as_rank(run: Path, meeting: Path, rank: int) -> None:
    """What each process of a job does, without torch."""
    barrier = ckptkit.FileBarrier(meeting, rank, _WRITERS, timeout=_TIMEOUT)
    for step in STEPS:
        with ckptkit.Writer(
            run,
            step=step,
            strategy=STRATEGY,
            rank=rank,
            barrier=barrier,
            details={"precision": "float32", "model": "a tiny transformer"},
        ) as writer:
            for name, whole in state(step):
                rows = -(-len(whole) // _WRITERS)  # as torch.chunk cuts them: the last may be fewer
                group, _, parameter = name.partition("/")
                of = f"model/{parameter.rpartition('/')[0]}" if group == "optimizer" else None
                writer.add(
                    name,
                    whole[rank * rows : (rank + 1) * rows],
                    shape=whole.shape,
                    placements={"fsdp": "shard(0)"},
                    role="optimizer" if of else "param",
                    of=of,
                )
            writer.add_alias("model/lm_head.weight", "model/embed_tokens.weight")
            writer.add_object("learning_rate", 3e-4)
            writer.add_object("tokens", ckptkit.Sum(step * 1024))
            writer.add_object("dropout_seed", ckptkit.PerRank(1000 + rank))


def state(step: int) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Name and whole value of every array at a step."""
    shapes = {"embed_tokens.weight": (_VOCABULARY, _DIM), "norm.weight": (_DIM,)}
    for layer in range(_LAYERS):
        for name, shape in _LAYER.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
    random = np.random.default_rng(step)
    for name, shape in shapes.items():
        for kind in (f"model/{name}", f"optimizer/{name}/exp_avg", f"optimizer/{name}/exp_avg_sq"):
            yield kind, random.standard_normal(shape, dtype=np.float32)


if __name__ == "__main__":
    save_as_rank(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
