"""Tensors as numpy sees them: the same memory, as raw elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from isal import isal_zlib
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


def as_bits(name: str, tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The memory of a tensor in host memory, as an array of raw elements."""
    check_plain(name, tensor)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    bits = _BITS.get(tensor.element_size())
    array: npt.NDArray[Any] = (tensor if bits is None else tensor.view(bits)).numpy()
    return array.view(dtype_of(name, tensor).bits)


def checksum(name: str, tensor: torch.Tensor) -> int:
    """The CRC-32 of the elements."""
    elements = np.ascontiguousarray(as_bits(name, tensor.cpu())).reshape(-1)
    return int(isal_zlib.crc32(elements.view(np.uint8)))


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
