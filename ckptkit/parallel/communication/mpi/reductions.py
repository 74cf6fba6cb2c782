"""Torch's dtypes and reductions as MPI's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from ckptkit.errors import UnsupportedTypeError

_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
}
_OPS = {
    dist.ReduceOp.SUM: MPI.SUM,
    dist.ReduceOp.AVG: MPI.SUM,
    dist.ReduceOp.PRODUCT: MPI.PROD,
    dist.ReduceOp.MAX: MPI.MAX,
    dist.ReduceOp.MIN: MPI.MIN,
    dist.ReduceOp.BAND: MPI.BAND,
    dist.ReduceOp.BOR: MPI.BOR,
    dist.ReduceOp.BXOR: MPI.BXOR,
}
_OF_BOOLEANS = {dist.ReduceOp.SUM: dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT: dist.ReduceOp.MIN}


@dataclass(frozen=True, slots=True)
class Reduction:
    """How MPI reduces tensors of a dtype, and how the result becomes what torch would give."""

    op: Any
    is_mean: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, op: Any, dtype: torch.dtype) -> Reduction:
        """The reduction that torch asks for."""
        kind = getattr(op, "op", op)
        if dtype == torch.bool:
            kind = _OF_BOOLEANS.get(kind, kind)
        if kind not in _OPS:
            raise UnsupportedTypeError("MPI has no such reduction", value=str(op))
        if dtype not in (*_TYPES, torch.bool) and not (dtype.is_floating_point or dtype.is_complex):
            raise UnsupportedTypeError("MPI cannot reduce values of this dtype", value=str(dtype))
        if dtype.is_complex and kind not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise UnsupportedTypeError("complex numbers can only be added up", value=str(op))
        return cls(_OPS[kind], kind == dist.ReduceOp.AVG, dtype)

    def carried(self, tensor: torch.Tensor) -> torch.Tensor:
        """A flat copy of a tensor in a dtype that MPI knows; half types are added up as float32."""
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        if self.dtype.is_complex:
            wide = torch.complex128 if self.dtype == torch.complex128 else torch.complex64
            return torch.view_as_real(flat.to(wide, copy=True)).reshape(-1)
        if self.dtype == torch.bool:
            return flat.to(torch.uint8)
        return flat.clone() if self.dtype in _TYPES else flat.to(torch.float32)

    def landed(self, carried: torch.Tensor, size: int, into: torch.Tensor) -> None:
        """Put the result of so many ranks into a tensor."""
        if self.is_mean:
            carried = carried / size
        if self.dtype.is_complex:
            carried = torch.view_as_complex(carried.reshape(-1, 2))
        with torch.no_grad():
            into.copy_(carried.to(self.dtype).reshape(into.shape))


def buffer(tensor: torch.Tensor) -> Any:
    """Dense elements as MPI takes them."""
    # No count: for some collectives mpi4py takes it as that of each rank, and checks no bounds.
    return [tensor.numpy(), _TYPES[tensor.dtype]]
