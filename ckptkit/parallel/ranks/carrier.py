"""What carries the messages of a communicator, and tensors as the bytes and numbers it carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ckptkit.errors import UnsupportedTypeError, UsageError

DEFAULT_TIMEOUT = 600.0
OPS = ("sum", "mean", "max", "min")
_LOWEST = torch.iinfo(torch.int64).min  # its bits are those of the sign


class Carrier(Protocol):
    """Moves flat, dense tensors on `device` between the ranks of one group.

    A communicator has made sure that all ranks make the same call with fitting sizes, and never
    moves nothing, so an implementation checks neither. What the other ranks do not do within
    `timeout` seconds is a PeerError, and so is their end; never a hang.
    """

    name: str
    rank: int
    size: int
    device: torch.device
    timeout: float

    def exchange(self, data: bytes) -> list[bytes]:
        """What every rank passes, in the order of the ranks; these are of any length."""

    def all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        """Put the sum, max or min of all ranks in place of what `widened` made."""

    def broadcast(self, data: torch.Tensor, src: int) -> None:
        """Put the bytes of rank `src` in place of those of the other ranks."""

    def all_to_all(self, parts: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
        """Give each rank its part, as bytes; get `sizes[rank]` bytes of each rank."""

    def send(self, data: torch.Tensor, dst: int, tag: int) -> None:
        """Send bytes; return when they may change, which may be when they were received."""

    def recv(self, data: torch.Tensor, src: int, tag: int) -> None:
        """Fill with the next bytes that `src` sends with this tag; or of all, without tags."""

    def split(self, ranks: tuple[int, ...]) -> Carrier | None:
        """A carrier between some ranks, ascending; None on the others. All ranks call it."""

    def close(self) -> None:
        """Let go of what the carrier itself has made."""


def as_bytes(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The elements, row by row; the same memory where it is dense and on the device."""
    return _flat(tensor, device).view(torch.uint8)


def from_bytes(data: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor that `as_bytes` took apart."""
    if not data.numel():
        return torch.empty(shape, dtype=dtype, device=data.device)
    return data.view(dtype).reshape(shape)


def check_reduction(op: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise where tensors cannot be put together so."""
    if op not in OPS:
        raise UsageError("no such reduction", value=op, hint=f"there are {', '.join(OPS)}")
    for dtype in {tensor.dtype for tensor in tensors}:
        wide_dtype(dtype)
        if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
            hint = "use sum, or convert them first"
            raise UnsupportedTypeError("the mean of integers is none", value=str(dtype), hint=hint)
        if op in ("max", "min") and dtype.is_complex:
            raise UnsupportedTypeError("complex numbers have no order", value=str(dtype))


def widened(tensor: torch.Tensor, op: str, device: torch.device) -> torch.Tensor:
    """A flat copy in a dtype that everything can reduce: uint8, int32, int64, float32 or float64.

    What is narrower than float32 is added up as float32 and rounded once, so that backends do not
    differ; sums of integers wrap around as those of torch do.
    """
    flat, dtype = _flat(tensor, device), tensor.dtype
    if dtype.is_complex:
        wide = torch.complex128 if dtype == torch.complex128 else torch.complex64
        return torch.view_as_real(flat.to(wide, copy=True)).reshape(-1)
    if dtype == torch.uint64:
        # Nothing adds up or compares these. Their bits add up as those of int64 do, and with the
        # highest one turned over they are in the order of int64.
        bits = flat.view(torch.int64)
        return bits ^ _LOWEST if op in ("max", "min") else bits.clone()
    return flat.to(wide_dtype(dtype), copy=True)


def narrowed(wide: torch.Tensor, op: str, size: int, like: torch.Tensor) -> torch.Tensor:
    """What the reduction of `widened` tensors of `size` ranks comes to."""
    if op == "mean":
        wide = wide / size
    dtype = like.dtype
    if dtype.is_complex:
        found = torch.view_as_complex(wide.reshape(-1, 2)).to(dtype)
    elif dtype == torch.uint64:
        found = (wide ^ _LOWEST if op in ("max", "min") else wide).view(torch.uint64)
    else:
        found = wide.to(dtype)
    return found.reshape(like.shape).to(like.device)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What values of a dtype are reduced as."""
    if dtype.is_complex or dtype.is_floating_point:
        return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
    if dtype == torch.bool:
        return torch.uint8
    if dtype in (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32):
        return torch.int32
    if dtype in (torch.int64, torch.uint32, torch.uint64):
        return torch.int64
    raise UnsupportedTypeError("values of this dtype cannot be reduced", value=str(dtype))


def carried_op(op: str, dtype: torch.dtype) -> str:
    """The reduction that a carrier is asked for: booleans are added up as torch does, by or."""
    if dtype == torch.bool and op == "sum":
        return "max"
    return "sum" if op == "mean" else op


def combine(total: torch.Tensor, other: torch.Tensor, op: str) -> None:
    """Reduce two flat tensors into the first."""
    if op == "sum":
        total += other
    elif op == "max":
        torch.maximum(total, other, out=total)
    else:
        torch.minimum(total, other, out=total)


def _flat(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device).resolve_conj().resolve_neg().contiguous().reshape(-1)
