"""Gradients in fewer bytes, for DDP and ZeRO-1."""

from __future__ import annotations

from collections.abc import Callable

from ckptkit.errors import UsageError
from ckptkit.parallel.optimizers.compression.cast import Cast
from ckptkit.parallel.optimizers.compression.compression import Compression
from ckptkit.parallel.optimizers.compression.int8 import Int8
from ckptkit.parallel.optimizers.compression.powersgd import PowerSGD
from ckptkit.parallel.optimizers.compression.topk import TopK

__all__ = ["Compression", "compression_of"]

_KNOWN = '"fp16", "bf16", "int8", "topk:0.01" (a share), "powersgd:4" (a rank)'


def compression_of(spec: str | Compression, *, after: int = 2) -> Compression:
    """The compression that a text such as "powersgd:4" means; `after` is how many steps PowerSGD
    sends as they are.
    """
    if isinstance(spec, Compression):
        return spec
    if after < 0:
        raise UsageError("a number of steps", where="after", value=after)
    name, colon, amount = spec.partition(":")
    try:
        if name in ("fp16", "bf16", "int8") and not colon:
            return Int8(spec) if name == "int8" else Cast(spec)
        if name == "topk":
            return TopK(spec, _within(float(amount), lambda share: 0 < share <= 1))
        if name == "powersgd":
            return PowerSGD(spec, int(_within(int(amount), lambda rank: rank >= 1)), after)
    except ValueError as error:
        raise _unknown(spec) from error
    raise _unknown(spec)


def _within(number: float, fits: Callable[[float], bool]) -> float:
    if not fits(number):
        raise ValueError
    return number


def _unknown(spec: str) -> UsageError:
    return UsageError("no compression", where="compression", value=spec, hint=f"known: {_KNOWN}")
