"""What is saved: the training state of few layers of Llama 2 7B, bf16 parameters and two fp32
moments.
"""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

HIDDEN, FFN, VOCAB = 4096, 11008, 32000
MOMENTS = ("exp_avg", "exp_avg_sq")

# The bits of an element: numpy alone has no bfloat16.
BITS: dict[str, np.dtype[Any]] = {"bfloat16": np.dtype(np.uint16), "float32": np.dtype(np.float32)}

_SUMMED = re.compile(r"\.(o_proj|down_proj)\.")
_BYTES_PER_PARAMETER = 2 + 4 + 4
_TRIAL_GIB, _TRIAL_SHRINK = 0.5, 8
_ALIGNMENT = 64  # as torch allocates
_PATTERN = (16 << 20) + 8  # no multiple of any chunk: two chunks never hold the same bytes


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the state."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    of: str | None = None

    @property
    def sliced(self) -> tuple[int, ...]:
        """The dims that layouts cut: by columns what tensor parallelism sums up."""
        return (0, 1) if _SUMMED.search(self.name) else (0,)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * BITS[self.dtype].itemsize


def llama(gib: float, narrower: int = 1) -> list[Tensor]:
    """The tensors of at least so many GiB: a tied embedding, and as many layers as that takes.

    One layer of that size is more than 3 GB, of one `narrower` by 4 a sixteenth of it; what is
    asked to be small has narrow ones, to try a benchmark out.
    """
    shrink = max(narrower, _TRIAL_SHRINK if gib < _TRIAL_GIB else 1)
    hidden, ffn, vocab = HIDDEN // shrink, FFN // shrink, VOCAB // shrink
    fixed = {"embed_tokens": (vocab, hidden), "norm": (hidden,)}
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    wanted = gib * (1 << 30) / _BYTES_PER_PARAMETER - _elements(fixed)
    count = max(1, math.ceil(wanted / _elements(layer)))
    shapes = fixed | {f"layers.{n}.{k}": shape for n in range(count) for k, shape in layer.items()}
    tensors = [Tensor(f"model/{name}.weight", s, "bfloat16") for name, s in shapes.items()]
    for name, shape in shapes.items():
        path = f"{name}.weight"
        tensors += [
            Tensor(f"optimizer/{path}/{moment}", shape, "float32", f"model/{path}")
            for moment in MOMENTS
        ]
    return tensors


def total_bytes(tensors: list[Tensor]) -> int:
    """The bytes of all tensors together."""
    return sum(tensor.nbytes for tensor in tensors)


class Memory(Protocol):
    """All that one rank holds."""

    @property
    def rank(self) -> int:
        """Which rank it is."""

    @property
    def nbytes(self) -> int:
        """Its bytes."""

    def flat(self) -> list[npt.NDArray[np.uint8]]:
        """The memory of each tensor, as bytes."""


def digest(memory: Memory) -> int:
    """A checksum of everything."""
    value = 0
    for flat in memory.flat():
        value = zlib.crc32(flat.data, value)
    return value


def clear(memory: Memory) -> None:
    """Zeros everywhere, so that a load cannot succeed by doing nothing."""
    for flat in memory.flat():
        flat.fill(0)


class Part:
    """What one rank holds: rows of every tensor, of random bytes, as arrays of raw elements."""

    def __init__(self, tensors: list[Tensor], rank: int = 0, world_size: int = 1) -> None:
        self.tensors = tensors
        self.rank = rank
        self.world_size = world_size
        self.arrays = {tensor.name: self._empty(tensor) for tensor in tensors}
        pattern = np.frombuffer(np.random.default_rng(rank).bytes(_PATTERN), np.uint8)
        for number, flat in enumerate(self.flat()):
            start = number * 12345 % _PATTERN
            _repeat(np.roll(pattern, -start), flat)

    @property
    def nbytes(self) -> int:
        """The bytes this rank holds."""
        return sum(array.nbytes for array in self.arrays.values())

    def flat(self) -> list[npt.NDArray[np.uint8]]:
        """The memory of each tensor, as bytes."""
        return [array.reshape(-1).view(np.uint8) for array in self.arrays.values()]

    def _empty(self, tensor: Tensor) -> npt.NDArray[Any]:
        rows = -(-tensor.shape[0] // self.world_size)
        mine = min(rows, tensor.shape[0] - rows * self.rank)
        shape, bits = (mine, *tensor.shape[1:]), BITS[tensor.dtype]
        memory = np.empty(math.prod(shape) * bits.itemsize + _ALIGNMENT, np.uint8)
        start = -memory.__array_interface__["data"][0] % _ALIGNMENT
        return memory[start : len(memory) - _ALIGNMENT + start].view(bits).reshape(shape)


def _elements(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes.values()))


def _repeat(pattern: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
    for begin in range(0, len(target), len(pattern)):
        piece = target[begin : begin + len(pattern)]
        piece[:] = pattern[: len(piece)]
