"""What the ranks tell each other before a collective: which call they make, with what."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ckptkit.errors import FormatError, PeerError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """The dtype and the shape of a tensor."""

    dtype: str
    shape: Shape

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
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
    forms: tuple[Form, ...] = ()
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
        found = tuple(Form(dtype, tuple(shape)) for dtype, shape in forms)
        return cls(name, options, found, problem)

    def __str__(self) -> str:
        return f"{self.name}({self.options})"


def check_same_call(calls: Sequence[Call]) -> None:
    """Raise, on all ranks alike, unless all make the same call and can make it."""
    unable = [(rank, call.problem) for rank, call in enumerate(calls) if call.problem]
    if unable:
        rank, problem = unable[0]
        raise PeerError(f"rank {rank} cannot make this call: {problem}", where=calls[rank].name)
    _check_alike([f"{call}" for call in calls], "the ranks make different calls", "")


def check_same_forms(calls: Sequence[Call]) -> None:
    """Raise, on all ranks alike, unless their tensors have the same dtypes and shapes."""
    _each(calls, lambda form: form.dtype, "the dtypes of the ranks differ")
    _each(calls, str, "the shapes of the ranks differ")


def check_same_dtypes(calls: Sequence[Call]) -> None:
    """Raise, on all ranks alike, unless all tensors are of one dtype."""
    found = [sorted({form.dtype for form in call.forms}) for call in calls]
    if len({dtype for dtypes in found for dtype in dtypes}) > 1:
        shown = "; ".join(f"rank {rank}: {', '.join(d)}" for rank, d in enumerate(found[:8]))
        raise PeerError(f"the dtypes of the ranks differ: {shown}", where=calls[0].name)


def _each(calls: Sequence[Call], told: Callable[[Form], str], what: str) -> None:
    _check_alike([", ".join(map(told, call.forms)) for call in calls], what, calls[0].name)


def _check_alike(told: Sequence[str], what: str, where: str) -> None:
    if len(set(told)) > 1:
        ranks: dict[str, list[str]] = {}
        for rank, text in enumerate(told):
            ranks.setdefault(text, []).append(str(rank))
        shown = "; ".join(f"rank {', '.join(who[:8])}: {text}" for text, who in ranks.items())
        raise PeerError(f"{what}: {shown}", where=where)
