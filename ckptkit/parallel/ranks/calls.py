"""What the ranks tell each other before a collective: which call they make, with what."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptkit.errors import FormatError, PeerError, UnsupportedTypeError
from ckptkit.format import leaves


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The dtype and the shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        """The form of a tensor."""
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its dtype, as torch knows it."""
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise FormatError("a rank sends values of a dtype unknown here", value=self.dtype)
        return found

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return self.torch_dtype.itemsize * torch.Size(self.shape).numel()

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


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
        forms = [[form.dtype, list(form.shape)] for form in self.forms]
        return json.dumps([self.name, self.options, forms, self.problem]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Call:
        """The call that `encode` has written."""
        name, options, forms, problem = json.loads(data)
        found = tuple(TensorForm(dtype, tuple(shape)) for dtype, shape in forms)
        return cls(name, options, found, problem)

    def __str__(self) -> str:
        return f"{self.name}({self.options})"


def check_same_call(calls: Sequence[Call]) -> None:
    """Raise, on all ranks alike, unless all make the same call and can make it."""
    for rank, call in enumerate(calls):
        if call.problem:
            what = f"rank {rank} cannot make this call: {call.problem}"
            raise PeerError(what, where=call.name)
    _check_alike([f"{call}" for call in calls], "the ranks make different calls", "")


def check_same_forms(calls: Sequence[Call]) -> None:
    """Raise, on all ranks alike, unless their tensors have the same dtypes and shapes."""
    told: Callable[[TensorForm], str]
    for told, what in ((lambda form: form.dtype, "dtypes"), (str, "shapes")):
        of_ranks = [", ".join(map(told, call.forms)) for call in calls]
        _check_alike(of_ranks, f"the {what} of the ranks differ", calls[0].name)


def check_same_dtypes(calls: Sequence[Call]) -> None:
    """Raise, on all ranks alike, unless all tensors are of one dtype."""
    found = [sorted({form.dtype for form in call.forms}) for call in calls]
    if len({dtype for dtypes in found for dtype in dtypes}) > 1:
        shown = "; ".join(f"rank {rank}: {', '.join(d)}" for rank, d in enumerate(found[:8]))
        raise PeerError(f"the dtypes of the ranks differ: {shown}", where=calls[0].name)


def _check_alike(told: Sequence[str], what: str, where: str) -> None:
    if len(set(told)) > 1:
        ranks: dict[str, list[str]] = {}
        for rank, text in enumerate(told):
            ranks.setdefault(text, []).append(str(rank))
        shown = "; ".join(f"rank {', '.join(who[:8])}: {text}" for text, who in ranks.items())
        raise PeerError(f"{what}: {shown}", where=where)


def dense_tensor(value: object, where: str) -> torch.Tensor:
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


def plain_value(value: object, where: str) -> torch.Tensor:
    """The bytes of a plain value; never a pickle, which runs what it is made of."""
    if isinstance(value, torch.Tensor):
        hint = "tensors have calls of their own, without _object in their names"
        raise UnsupportedTypeError("a tensor is no plain value", where=where, hint=hint)
    try:
        data = leaves.dumps(value, where)
    except UnsupportedTypeError as error:
        error.what = f"only plain values travel between ranks: {error.what}"
        raise
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def loaded(data: torch.Tensor) -> Any:
    """The value that `plain_value` took apart."""
    return leaves.unpack(data.cpu().numpy().tobytes(), "a message of another rank")
