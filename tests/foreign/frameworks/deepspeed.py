"""Where what DeepSpeed wrote is, for its tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.foreign.jobs import Wanted


def wanted(written: Path, case: str) -> Wanted:
    with np.load(written / f"{case.removesuffix('-universal')}.npz") as file:
        return dict(file)


def tag_of(place: Path) -> Path:
    (latest,) = place.glob("latest*")
    return place / latest.read_text()
