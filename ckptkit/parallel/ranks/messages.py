"""What a communicator sends: calls that ranks compare, and tensors and plain values as bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptkit.errors import PeerError, UnsupportedTypeError, UsageError
from ckptkit.format import leaves
from ckptkit.live.state.tensors import PLAIN, TensorForm, bytes_of

OPS = ("sum", "mean", "max", "min")
# By what a carrier is asked for.
_COMBINED: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
_LOWEST = torch.iinfo(torch.int64).min  # its bits are those of the sign


def from_bytes(data: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor that `bytes_of` took apart."""
    if not data.numel():
        return torch.empty(shape, dtype=dtype, device=data.device)
    return data.view(dtype).reshape(shape)


def check_reduction(op: str, forms: Sequence[TensorForm]) -> None:
    """Raise where values of these forms cannot be put together so."""
    if op not in OPS:
        raise UsageError("no such reduction", value=op, hint=f"there are {', '.join(OPS)}")
    for form in forms:
        if form.dtype == PLAIN:
            hint = "what is reduced are tensors, and numbers of 64 bits by all_reduce"
            raise UnsupportedTypeError("is no tensor", hint=hint)
        dtype = form.torch_dtype
        wide_dtype(dtype)
        if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
            hint = "use sum, or convert them first"
            raise UnsupportedTypeError("the mean of integers is none", value=form.dtype, hint=hint)
        if op in ("max", "min") and dtype.is_complex:
            raise UnsupportedTypeError("complex numbers have no order", value=form.dtype)


def widened(tensor: torch.Tensor, op: str, device: torch.device) -> torch.Tensor:
    """A flat copy in a dtype that everything can reduce: uint8, int32, int64, float32 or float64.

    What is narrower than float32 is added up as float32 and rounded once, so that backends do not
    differ; sums of integers wrap around as those of torch do.
    """
    flat, dtype = bytes_of(tensor.to(device)).view(tensor.dtype), tensor.dtype
    if dtype.is_complex:
        wide = torch.complex128 if dtype == torch.complex128 else torch.complex64
        return torch.view_as_real(flat.to(wide, copy=True)).reshape(-1)
    if dtype == torch.uint64:
        # Nothing adds up or compares these. Their bits add up as those of int64 do, and with the
        # highest one turned over they are in the order of int64.
        bits = flat.view(torch.int64)
        return bits ^ _LOWEST if op in ("max", "min") else bits.clone()
    return flat.to(wide_dtype(dtype), copy=True)


def combined(op: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum, max or min of `widened` tensors, in the place of the first, and in their order: a
    sum of floats depends on it.
    """
    total, *others = tensors
    for other in others:
        _COMBINED[op](total, other, out=total)
    return total


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


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one rank: its name and options must be those of all ranks."""

    name: str
    options: str = ""
    forms: tuple[TensorForm, ...] = ()
    problem: str = ""
    """Why this rank cannot make the call; the others are waiting to hear of it."""

    def encode(self) -> bytes:
        """The bytes for the other ranks: JSON, which runs no code."""
        forms = list(map(astuple, self.forms))
        return json.dumps([self.name, self.options, forms, self.problem]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Call:
        """The call that `encode` has written."""
        name, options, forms, problem = json.loads(data)
        return cls(name, options, tuple(map(TensorForm.heard, forms)), problem)


def check_same_forms(calls: Sequence[Call]) -> None:
    """Raise, on all ranks alike, unless their tensors have the same dtypes and shapes."""
    told: Callable[[TensorForm], str]
    for told, what in ((lambda form: form.dtype, "dtypes"), (str, "shapes")):
        of_ranks = [", ".join(map(told, call.forms)) for call in calls]
        check_same(of_ranks, f"the {what} of the ranks differ", calls[0].name)


def check_same(told: Sequence[str], what: str, where: str) -> None:
    """Raise what it means, on all ranks alike, unless they all tell the same."""
    if len(set(told)) > 1:
        ranks: dict[str, list[str]] = {}
        for rank, text in enumerate(told):
            ranks.setdefault(text, []).append(str(rank))
        shown = "; ".join(f"rank {', '.join(who[:8])}: {text}" for text, who in ranks.items())
        raise PeerError(f"{what}: {shown}", where=where)


def packed(value: object, where: str) -> tuple[torch.Tensor, TensorForm]:
    """What travels of a value, and its form: of a tensor that lies here as a whole itself, of a
    plain value the bytes; never a pickle, which runs what it is made of.
    """
    if isinstance(value, DTensor):
        raise UnsupportedTypeError(
            "a DTensor is spread over ranks already",
            where=where,
            hint="pass what this rank holds of it: .to_local()",
        )
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise UnsupportedTypeError(
                "only dense tensors can be sent", where=where, value=str(value.layout)
            )
        return value.detach(), TensorForm.of(value)
    try:
        data = leaves.dumps(value, where)
    except UnsupportedTypeError as error:
        error.what = f"besides tensors only plain values travel between ranks: {error.what}"
        raise
    return torch.frombuffer(bytearray(data), dtype=torch.uint8), TensorForm(PLAIN, (len(data),))


def unpacked(data: torch.Tensor, form: TensorForm, device: torch.device) -> Any:
    """The value that was packed; a tensor on a device."""
    if form.dtype == PLAIN:
        return leaves.unpack(data.cpu().numpy().tobytes(), "a message of another rank")
    return from_bytes(data, form.torch_dtype, form.shape).to(device)
