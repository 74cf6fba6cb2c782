"""Tensors as numpy sees them: the same memory, as raw elements."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from ckptkit.errors import UnsupportedTypeError, UsageError
from ckptkit.model import DType

_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def dtype_of(name: str, tensor: torch.Tensor) -> DType:
    """The element type of a tensor."""
    try:
        return DType.of(tensor.dtype)
    except UnsupportedTypeError as error:
        error.where = name
        raise


def torch_dtype(dtype: DType) -> torch.dtype:
    """The name torch has for an element type."""
    found: torch.dtype = getattr(torch, dtype.torch)
    return found


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, outside of autograd."""
    tensor = tensor.detach()
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def as_spread(value: torch.Tensor, parameter: object) -> torch.Tensor:
    """What `DistributedDataParallel` keeps as a plain parameter of this rank, or a value of its
    shape, as the DTensor of the same memory that it is outside of the wrapper.
    """
    spec = getattr(parameter, "_st_info", None)
    if spec is None or isinstance(value, DTensor) or value.shape != parameter.shape:  # type: ignore[attr-defined]
        return value
    return DTensor.from_local(
        value.detach(),
        spec.mesh,
        spec.placements,
        run_check=False,
        shape=spec.shape,
        stride=spec.stride,
    )


def as_bits(name: str, tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The memory of a tensor in host memory, as an array of raw elements."""
    check_plain(name, tensor)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    bits = _BITS.get(tensor.element_size())
    array: npt.NDArray[Any] = (tensor if bits is None else tensor.view(bits)).numpy()
    return array.view(dtype_of(name, tensor).bits)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same, NaNs and signs of zeros too."""
    as_bytes = [each.resolve_conj().resolve_neg().contiguous().reshape(-1) for each in (one, other)]
    return torch.equal(as_bytes[0].view(torch.uint8), as_bytes[1].view(torch.uint8))


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Refuse tensors without elements of their own."""
    if tensor.device.type == "meta":
        raise UsageError(
            "the tensor is on the meta device: it has no values yet",
            where=name,
            hint="materialise the model first: model.to_empty(device=…)",
        )
    if tensor.layout != torch.strided:
        raise UnsupportedTypeError(
            "only dense tensors can be saved",
            where=name,
            value=str(tensor.layout),
            hint="store its indices and values as tensors of their own",
        )
