"""Refuses a torch that is too old, in one sentence, before anything asks it for what it lacks."""

from __future__ import annotations

import re

import torch

from ckptkit.errors import UsageError

OLDEST = (2, 13)

_found = tuple(map(int, re.findall(r"\d+", str(torch.__version__))[:2]))
if _found < OLDEST:
    raise UsageError(
        f"ckptkit.live needs torch {OLDEST[0]}.{OLDEST[1]} or newer",
        value=str(torch.__version__),
        hint="pip install -U torch; what needs no torch, such as `ckpt` and ckptkit.open, works",
    )
