"""The random number generators of a process, as plain values."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ckptkit.errors import UsageError


def rng_state() -> dict[str, Any]:
    """The state of the generators of Python, numpy and torch (CPU and CUDA); save it as
    `PerDataRank(rng_state())`: ranks that work on the same data, as those of `tp` do, have to draw
    the same numbers. `PerRank` is for jobs that only ever go on as they were spread.
    """
    kind, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 — what most programs still use
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys), int(place), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state().numpy(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = [each.numpy() for each in torch.cuda.get_rng_state_all()]
    return state


def set_rng_state(state: dict[str, Any] | None) -> None:
    """Set the generators to a state; None, the fallback of another world size, changes nothing."""
    if state is None:
        return
    unknown = sorted(set(state) - {"python", "numpy", "torch", "cuda"})
    if unknown or not {"python", "numpy", "torch"} <= set(state):
        raise UsageError("not a state of rng_state()", value=sorted(state))
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(torch.from_numpy(state["torch"].copy()))
    devices = state.get("cuda", [])
    if devices and torch.cuda.is_available() and len(devices) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([torch.from_numpy(each.copy()) for each in devices])
