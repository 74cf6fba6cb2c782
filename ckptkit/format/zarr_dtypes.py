"""The dtypes that zarr-python lacks, as its data type plugins: bfloat16, the 8-bit floats,
complex of two float16.

zarr-python 3.1 does not load the entry point group `zarr.data_type` by itself, so `import
ckptkit` registers them too; `ckpt` does so where it opens a step by zarr.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self, TypeGuard

import numpy as np
import zarr.dtype
import zarr.errors
from zarr.dtype import ZDType, data_type_registry

from ckptkit.model import DTYPES, DType

# zarr 3.1 has it in zarr.dtype, and later ones warn of whoever looks there.
_NAME = "DataTypeValidationError"
_WrongDType: type[ValueError] = getattr(zarr.errors, _NAME, None) or getattr(zarr.dtype, _NAME)


class _Plugin(ZDType[Any, Any]):
    """One ckptkit dtype, presented to zarr-python."""

    known: ClassVar[DType]
    dtype_cls = np.dtype

    @property
    def item_size(self) -> int:
        return self.known.itemsize

    @classmethod
    def _check_native_dtype(cls, dtype: Any) -> TypeGuard[Any]:
        return bool(dtype == cls.known.numpy)

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        """For the numpy dtype that it wraps, and for no other."""
        if cls._check_native_dtype(dtype):
            return cls()
        raise _WrongDType(f"{dtype} is not {cls.known.name}")

    def to_native_dtype(self) -> Any:
        return self.known.numpy

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        raise _WrongDType(f"{cls.known.name} is not in Zarr v2, {data} is something else")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data == cls.known.name:
            return cls()
        raise _WrongDType(f"{data} is not {cls.known.name}")

    def to_json(self, zarr_format: Any) -> Any:
        if zarr_format != 3:
            raise _WrongDType(f"{self.known.name} is not in Zarr v{zarr_format}")
        return self.known.name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, (int, float, np.number, np.void, tuple))

    def cast_scalar(self, data: object) -> Any:
        return np.array(data, dtype=self.known.numpy)[()]

    def default_scalar(self) -> Any:
        return np.zeros((), dtype=self.known.numpy)[()]

    def from_json_scalar(self, data: Any, *, zarr_format: Any) -> Any:  # noqa: ARG002
        """A fill value: a number, a pair, a named value or the bits in hexadecimal."""
        if isinstance(data, str) and data.startswith("0x"):
            raw = int(data, 16).to_bytes(self.known.itemsize, "little")
            return np.frombuffer(raw, dtype=self.known.numpy)[0]
        return self.cast_scalar(tuple(data) if isinstance(data, list) else float(data))

    def to_json_scalar(self, data: object, *, zarr_format: Any) -> Any:  # noqa: ARG002
        """The bits in hexadecimal, which says every value of every one of these types."""
        raw = np.asarray(data, dtype=self.known.numpy).tobytes()
        if self.known.name.startswith("complex"):
            return [float(part) for part in np.frombuffer(raw, "<f2")]
        return f"0x{int.from_bytes(raw, 'little'):0{2 * len(raw)}x}"


def _plugin(name: str) -> type[_Plugin]:
    attributes = {"known": DTYPES[name], "_zarr_v3_name": name, "__module__": __name__}
    return type(f"Zarr_{name}", (_Plugin,), attributes)


BFloat16 = _plugin("bfloat16")
Float8E4M3FN = _plugin("float8_e4m3fn")
Float8E5M2 = _plugin("float8_e5m2")
Float8E4M3FNUZ = _plugin("float8_e4m3fnuz")
Float8E5M2FNUZ = _plugin("float8_e5m2fnuz")
Float8E8M0FNU = _plugin("float8_e8m0fnu")
ComplexFloat16 = _plugin("complex_float16")


def register() -> None:
    """Make zarr-python read and write them; what somebody else has registered stays."""
    for plugin in _Plugin.__subclasses__():
        if plugin.known.name not in data_type_registry.contents:
            data_type_registry.register(plugin.known.name, plugin)
