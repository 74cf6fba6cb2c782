"""Tensors of any dtype and shape as what a transport carries, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from ckptkit.errors import LayoutError, UnsupportedTypeError, UsageError

OPS = ("sum", "mean", "max", "min")
_NARROW_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.uint16)
_LOWEST = torch.iinfo(torch.int64).min  # its bits are those of the sign


def checked(value: object, where: str) -> torch.Tensor:
    """A value if it is a tensor that lies here as a whole; raises what it is otherwise."""
    if not isinstance(value, torch.Tensor):
        raise UnsupportedTypeError(
            "is no tensor", where=where, value=value, hint="objects have calls of their own"
        )
    if isinstance(value, DTensor):
        raise UnsupportedTypeError(
            "a DTensor is spread over ranks already",
            where=where,
            hint="pass what this rank holds of it: .to_local()",
        )
    if value.layout != torch.strided or value.is_quantized:
        raise UnsupportedTypeError(
            "only dense tensors can be sent", where=where, value=str(value.layout)
        )
    return value.detach()


def as_bytes(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The elements, row by row; the same memory where it is dense and on the device."""
    dense = tensor.to(device).resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8)


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
        if not (dtype.is_complex or dtype in (torch.bool, torch.uint64)):
            _wide_of(dtype)
        if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
            hint = "use sum, or convert them first"
            raise UnsupportedTypeError("the mean of integers is none", value=str(dtype), hint=hint)
        if op in ("max", "min") and dtype.is_complex:
            raise UnsupportedTypeError("complex numbers have no order", value=str(dtype))


def check_count(tensors: Sequence[torch.Tensor], size: int) -> None:
    """Raise unless there is one tensor for each rank."""
    if len(tensors) != size:
        raise LayoutError(f"{len(tensors)} tensors are not one for each of the {size} ranks")


def check_rank(number: int, size: int, where: str = "") -> None:
    """Raise unless it is the number of a rank."""
    if not 0 <= number < size:
        raise UsageError(f"no such rank: there are 0 to {size - 1}", where=where, value=number)


def widened(tensor: torch.Tensor, op: str, device: torch.device) -> torch.Tensor:
    """A flat copy whose dtype every transport can reduce.

    What is narrower than float32 is added up as float32 and rounded once, so that backends do not
    differ; sums of integers wrap around as those of torch do.
    """
    flat = tensor.to(device).resolve_conj().resolve_neg().contiguous().reshape(-1)
    dtype = tensor.dtype
    if dtype.is_complex:
        wide = torch.complex128 if dtype == torch.complex128 else torch.complex64
        return torch.view_as_real(flat.to(wide, copy=True)).reshape(-1)
    if dtype == torch.bool:
        return flat.to(torch.uint8)
    if dtype == torch.uint64:
        bits = flat.view(torch.int64)
        return bits.clone() if op == "sum" else bits ^ _LOWEST
    return flat.to(_wide_of(dtype), copy=True)


def narrowed(wide: torch.Tensor, op: str, size: int, like: torch.Tensor) -> torch.Tensor:
    """What the transport's reduction of `widened` tensors of `size` ranks comes to."""
    if op == "mean":
        wide = wide / size
    dtype = like.dtype
    if dtype.is_complex:
        found = torch.view_as_complex(wide.reshape(-1, 2)).to(dtype)
    elif dtype == torch.uint64:
        found = (wide if op == "sum" else wide ^ _LOWEST).view(torch.uint64)
    elif dtype == torch.bool:
        found = wide != 0
    else:
        found = wide.to(dtype)
    return found.reshape(like.shape).to(like.device)


def carried_op(op: str, dtype: torch.dtype) -> str:
    """The reduction that a transport is asked for: booleans are added up as torch does, by or."""
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


def _wide_of(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point:
        return torch.float64 if dtype == torch.float64 else torch.float32
    if dtype in _NARROW_INTEGERS or dtype == torch.int32:
        return torch.int32
    if dtype in (torch.int64, torch.uint32):
        return torch.int64
    raise UnsupportedTypeError("values of this dtype cannot be reduced", value=str(dtype))
