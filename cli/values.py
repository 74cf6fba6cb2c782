"""Values that are no tensors, shown: whatever the format holds, and however long."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import numpy as np


def as_json(value: Any) -> Any:
    """A value as JSON has it; what JSON lacks is `{"type": …, "text": …}`, in short."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    # Readers of JSON may hold numbers as doubles.
    if isinstance(value, int) and abs(value) <= 1 << 53:
        return value
    if isinstance(value, list):
        return [as_json(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: as_json(item) for key, item in value.items()}
    return {"type": type(value).__name__, "text": _SHORT.repr(value)}


def in_short(value: Any, width: int = 72) -> str:
    """A value on one line, cut where it gets long."""
    text = _SHORT.repr(value)
    return text if len(text) <= width else f"{text[: width - 3]}..."


class _Short(reprlib.Repr):
    """repr with bounds, by the name of the type, as `reprlib` asks for."""

    def repr_int(self, value: int, level: int) -> str:
        try:
            return super().repr_int(value, level)
        except ValueError:  # Python turns no integer of thousands of digits into text
            return f"<an integer of {value.bit_length()} bits>"

    def repr_bytes(self, value: bytes, level: int) -> str:  # noqa: ARG002
        return f"<{len(value)} bytes>"

    def repr_ndarray(self, value: np.ndarray[Any, Any], level: int) -> str:  # noqa: ARG002
        return f"<{value.dtype} of shape {value.shape}>"

    def repr_datetime(self, value: datetime, level: int) -> str:  # noqa: ARG002
        return value.isoformat()

    def repr_instance(self, value: Any, level: int) -> str:
        if isinstance(value, np.generic):
            return f"{value.dtype}({value})"
        return super().repr_instance(value, level)


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlong = 40
