"""Which tensors follow which: optimizer state, and copies such as averages, follow parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from ckptkit.model import Placement


@dataclass(frozen=True, slots=True)
class Tensor:
    """What has to be known of a tensor to place it; `placements` are those of the source."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    role: str
    of: str | None
    placements: tuple[Placement, ...]

    @property
    def elements(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Subject:
    """A tensor, its name inside of its group, and the parameter that it follows: often itself."""

    tensor: Tensor
    inner: str
    lead: Tensor

    @property
    def has_shape_of_lead(self) -> bool:
        """Whether it is cut as the parameter is; what is 0-d is never cut."""
        return bool(self.tensor.shape) and self.tensor.shape == self.lead.shape

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter, or may well be one: nobody said what it is."""
        return _is_parameter(self.tensor)

    @property
    def is_of_model(self) -> bool:
        """Whether it belongs to the model, or follows what does; what is neither is only kept."""
        return self.tensor.role != "other" or self.is_parameter or self.lead is not self.tensor


def subjects_of(tensors: Sequence[Tensor]) -> list[Subject]:
    """The tensors, in their order, with what each of them follows."""
    by_name = {tensor.name: tensor for tensor in tensors}
    parameters = {inner_name(t): t for t in tensors if _is_parameter(t)}
    absent = _stand_ins(tensors, by_name)
    return [_subject(tensor, by_name, parameters, absent) for tensor in tensors]


def inner_name(tensor: Tensor) -> str:
    """The name inside of its group: of optimizer state, its parameter's."""
    if tensor.of is not None:
        return _inside(tensor.of)
    nodes = tensor.name.split("/")
    if tensor.role == "optimizer" and len(nodes) > 2:
        return _plain(nodes[1:-1])
    return _inside(tensor.name)


def _subject(
    tensor: Tensor,
    by_name: dict[str, Tensor],
    parameters: dict[str, Tensor],
    absent: dict[str, Tensor],
) -> Subject:
    inner, lead = inner_name(tensor), tensor
    if tensor.of is not None:
        lead = by_name.get(tensor.of) or absent[tensor.of]
    elif tensor.role in ("other", "optimizer") and not _is_parameter(tensor):
        same = parameters.get(inner)
        if same is not None and (same.shape == tensor.shape or tensor.role == "optimizer"):
            lead = same
    return Subject(tensor, inner, lead)


def _stand_ins(tensors: Sequence[Tensor], by_name: dict[str, Tensor]) -> dict[str, Tensor]:
    """For parameters that are not there, the largest of their state: it has their shape."""
    found: dict[str, Tensor] = {}
    for tensor in tensors:
        if tensor.of is not None and tensor.of not in by_name:
            known = found.get(tensor.of)
            if known is None or (tensor.elements, len(tensor.shape)) > (
                known.elements,
                len(known.shape),
            ):
                found[tensor.of] = tensor
    return found


def _is_parameter(tensor: Tensor) -> bool:
    return tensor.role == "param" or (tensor.role == "other" and tensor.name.startswith("model/"))


def _inside(name: str) -> str:
    nodes = name.split("/")
    return _plain(nodes[1:] or nodes)


def _plain(nodes: list[str]) -> str:
    return "/".join(unquote(node) for node in nodes)
