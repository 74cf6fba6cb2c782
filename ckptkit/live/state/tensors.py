"""Tensors as numpy sees them: the same memory, as raw elements. And tensors made of others."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from isal import isal_zlib
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptkit.errors import PeerError, UnsupportedTypeError, UsageError
from ckptkit.model import DTYPES, DType

# Without a view by torch, which takes longer than all else. Complex ones may be conjugate.
_KNOWN_TO_NUMPY = frozenset(
    [torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]
)
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}

_PORTABLE = 1  # pinned for all devices of the process

_USUAL = (torch.Tensor, torch.nn.Parameter)

_dtype = cache(DType.of)
_STORED = {getattr(torch, dtype.torch, None) for dtype in DTYPES.values()}


def dtype_of(name: str, tensor: torch.Tensor) -> DType:
    """The element type of a tensor."""
    try:
        return _dtype(tensor.dtype)
    except UnsupportedTypeError as error:
        error.where = name
        raise


@cache
def torch_dtype(dtype: DType) -> torch.dtype:
    """The name torch has for an element type."""
    found: torch.dtype = getattr(torch, dtype.torch)
    return found


def dtype_name(dtype: torch.dtype | None) -> str | None:
    """A torch dtype as documents have it, such as `bfloat16`."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


PLAIN = "plain value"


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The dtype and the shape of a tensor, as one rank tells them another; of a plain value,
    `PLAIN` and the number of its bytes.
    """

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        return cls(str(dtype_name(tensor.dtype)), tuple(tensor.shape))

    @classmethod
    def heard(cls, said: object) -> TensorForm:
        """What another rank has told, as plain values."""
        name, shape = said if isinstance(said, (list, tuple)) and len(said) == 2 else ("", None)
        is_shape = isinstance(shape, (list, tuple)) and all(
            type(size) is int and size >= 0 for size in shape
        )
        is_dtype = name == PLAIN or isinstance(getattr(torch, str(name), None), torch.dtype)
        if not (is_shape and is_dtype):
            raise PeerError("no tensor of this protocol", value=said)
        return cls(str(name), tuple(shape or ()))

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = torch.uint8 if self.dtype == PLAIN else getattr(torch, self.dtype)
        return found

    @property
    def nbytes(self) -> int:
        return self.torch_dtype.itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, outside of autograd."""
    local: torch.Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    # What an optimizer keeps is outside already, and that of 100,000 parameters a second to detach.
    return local.detach() if local.requires_grad else local


def as_spread(value: torch.Tensor, parameter: object) -> torch.Tensor:
    """What `DistributedDataParallel` keeps as a plain parameter of this rank, or a value of its
    shape, as the DTensor of the same memory that it is outside of the wrapper.
    """
    spec = getattr(parameter, "_st_info", None)
    if spec is None or isinstance(value, DTensor) or value.shape != parameter.shape:  # type: ignore[attr-defined]
        return value
    return spread_as(value.detach(), spec)


def spread_as(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """The DTensor that lies so, of which this rank has this memory, wherever that is."""
    meta = TensorMeta(spec.shape, spec.stride, local.dtype)
    return DTensor(local, DTensorSpec(spec.mesh, spec.placements, meta), requires_grad=False)


def as_bits(name: str, tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The memory of a tensor in host memory, as an array of raw elements."""
    check_plain(name, tensor)
    return bits_of(name, tensor)


def bits_of(name: str, tensor: torch.Tensor) -> npt.NDArray[Any]:
    """`as_bits` of a tensor that is known to be plain."""
    if tensor.dtype in _KNOWN_TO_NUMPY and not (tensor.requires_grad or tensor.is_neg()):
        found: npt.NDArray[Any] = tensor.numpy()
        return found.view(dtype_of(name, tensor).bits)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    bits = _BITS.get(tensor.element_size())
    array: npt.NDArray[Any] = (tensor if bits is None else tensor.view(bits)).numpy()
    return array.view(dtype_of(name, tensor).bits)


def checksum(name: str, tensor: torch.Tensor) -> int:
    """The CRC-32 of the elements."""
    return checksum_of(as_bits(name, tensor.cpu()))


def checksum_of(bits: npt.NDArray[Any]) -> int:
    """The CRC-32 of raw elements."""
    return int(isal_zlib.crc32(np.ascontiguousarray(bits)))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a plain tensor, row by row, which every backend carries; the same memory where
    it is dense.
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def is_plain(local: torch.Tensor) -> bool:
    """Whether there is nothing to say against a tensor, nor to look at it closely."""
    return (
        type(local) in _USUAL
        and not local.is_nested
        and not local.is_meta
        and local.layout == torch.strided
        and local.dtype in _STORED
        and local.untyped_storage().data_ptr() != 0
    )


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Refuse tensors without elements of their own, before anybody asks for their shape."""
    if is_plain(tensor._local_tensor if isinstance(tensor, DTensor) else tensor):
        return
    if is_lazy(tensor):
        raise UsageError(
            "the module is lazy and has not seen an input: the tensor has no shape yet",
            where=name,
            hint="call the model once, as training would",
        )
    # Never imported here: it brings in torch's RPC.
    is_usual = type(tensor) in (*_USUAL, DTensor)
    if not is_usual and any(kind.__name__ == "ShardedTensorBase" for kind in type(tensor).__mro__):
        raise UnsupportedTypeError(
            "a ShardedTensor cannot be saved or filled",
            where=name,
            hint="use a DTensor: DTensor.from_local(tensor.local_tensor(), mesh, [Shard(0)])",
        )
    if tensor.is_nested:
        raise UnsupportedTypeError(
            "a nested tensor has no one shape",
            where=name,
            value=str(tensor.layout),
            hint="store its values() and offsets() as tensors of their own",
        )
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
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
    dtype_of(name, tensor)
    # The elements of wrappers lie in other tensors; a FakeTensor warns whoever asks for its memory.
    has_memory = False
    if type(tensor).__name__ != "FakeTensor":
        with suppress(RuntimeError, NotImplementedError):
            has_memory = tensor.untyped_storage().data_ptr() != 0 or not tensor.numel()
    if not has_memory:
        raise UnsupportedTypeError(
            f"a {type(tensor).__qualname__} has no memory of its own to save or to fill",
            where=name,
            hint="store the tensors that it is made of, each under a name of its own",
        )


def parts_of_tensor(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that this rank's part is made of; nothing for one that has its own elements."""
    local: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if type(local) in _USUAL or not is_traceable_wrapper_subclass(local) or tensor.is_nested:
        return {}
    names, _ = local.__tensor_flatten__()
    return {name: getattr(local, name) for name in names}


def devices_of(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    """The devices, other than the CPU, that tensors lie on."""
    return {tensor.device for tensor in tensors if not tensor.is_cpu}


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for all that any stream does on devices."""
    for device in devices:
        torch.accelerator.synchronize(device)


def host_memory(size: int, devices: Iterable[torch.device]) -> torch.Tensor:
    """Memory that tensors on these devices are copied to or from."""
    if any(device.type == "cuda" for device in devices):
        return pinned_memory(size)
    return torch.empty(size, dtype=torch.uint8, device="cpu")  # whatever the default is


def pinned_memory(size: int) -> torch.Tensor:
    """Host memory that CUDA copies to and from at full speed. Torch's own allocator takes the next
    power of two of it, and gives none back.
    """
    memory = _Pinned(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel may have none
            memory.madvise(mmap.MADV_HUGEPAGE)
    if hasattr(mmap, "MADV_DONTFORK"):
        # After a fork, a page that this process writes to would become another one, and the device
        # would go on to copy into the old one.
        memory.madvise(mmap.MADV_DONTFORK)
    # Touched by all threads of torch: CUDA alone would do it page by page.
    found = torch.frombuffer(memory, dtype=torch.uint8).zero_()
    address, cuda = found.data_ptr(), torch.cuda.cudart()
    torch.cuda.check_error(int(cuda.cudaHostRegister(address, len(memory), _PORTABLE)))
    memory.unpin = partial(cuda.cudaHostUnregister, address)
    return found[:size]


class _Pinned(mmap.mmap):
    """Memory that CUDA knows for as long as it exists."""

    unpin: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()
