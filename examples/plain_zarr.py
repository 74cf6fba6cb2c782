"""A checkpoint is Zarr: read it with zarr-python through ckptkit, or without it after unpacking.

Run: python examples/plain_zarr.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import zarr

import ckptkit


def main() -> None:
    """Three ways to the same numbers."""
    weight = np.random.default_rng(0).standard_normal((512, 384)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        with ckptkit.Writer(Path(folder, "run"), step=1) as writer:
            writer.add("model/weight", weight)

        with ckptkit.open(Path(folder, "run")) as checkpoint:
            array = zarr.open_array(checkpoint.zarr.store, path="model/weight", mode="r")
            print(f"through ckptkit, checked: {np.array_equal(array[:], weight)}")

        plain = Path(folder, "plain")
        for pack in Path(folder, "run").glob("step-*/data/*/*.zip"):
            ZipFile(pack).extractall(plain)  # any unzip does it
        array = zarr.open_array(plain / "model" / "weight", mode="r")
        print(f"unzipped: {np.array_equal(array[:], weight)}")

        (pack,) = Path(folder, "run").glob("step-*/data/*/*.zip")
        with zarr.storage.ZipStore(pack, mode="r") as store:
            array = zarr.open_array(store, path="model/weight", mode="r")
            print(f"one pack as a ZipStore: {np.array_equal(array[:], weight)}")


if __name__ == "__main__":
    main()
