"""Numbers of bytes, as people write them."""

from __future__ import annotations

import re

from ckptkit.errors import UsageError

_SIZES: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", 1)},
}
_QUANTITY = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)", re.ASCII)


def parse_size(what: int | str) -> int:
    """The bytes of a number, or of a text such as 4096, 512MiB or 1.5 GB."""
    if isinstance(what, int) and not isinstance(what, bool):
        size = what
    else:
        match = _QUANTITY.fullmatch(what.strip()) if isinstance(what, str) else None
        unit = _SIZES.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise UsageError("no size", value=what, hint="write 4096, 512MiB or 1.5GB")
        size = round(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if size < 1:
        raise UsageError("less than one byte", value=what, hint="write 512MiB or 1.5GB")
    return size
