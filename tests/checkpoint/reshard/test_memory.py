"""The cap on memory is one: measured, whatever the size of the step, in a process of its own."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptkit
from tests.checkpoint.saving import Tensor, random_values, save
from tests.servers.s3_server import Bucket

_MEASURED = """
import json, os, sys, threading, time
from pathlib import Path
import ckptkit
source, destination, to, memory, engine, options = sys.argv[1:]
options = json.loads(options)

def resident():
    total, own = 0, os.getpid()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if own in (parent, int(folder.name)):
                    total += int((folder / "statm").read_text().split()[1])
            except (OSError, IndexError):
                pass
    return total * os.sysconf("SC_PAGE_SIZE")

before, peak, done = resident(), 0, threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, resident())
        time.sleep(0.01)

if __name__ == "__main__":
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    rules = {"rules": [{"match": "*", "tp": "shard(1)"}]}
    how = {"memory": memory, "engine": engine, "storage_options": options}
    ckptkit.reshard(source, destination, to=to, rules=rules, **how)
    done.set()
    watcher.join()
    print(peak - before)
"""


def measured(
    folder: Path,
    places: tuple[object, object],
    memory: str,
    engine: str,
    options: Mapping[str, object],
) -> int:
    """By how many bytes a process and its children grow while they reshard."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("the system does not tell what is resident")
    script = folder / "measured.py"
    script.write_text(_MEASURED)
    command = [sys.executable, str(script), *map(str, places), "tp:4", memory, engine]
    command.append(json.dumps(dict(options)))
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@functools.cache
def values() -> Any:
    """Made by who asks, for all who collect tests import this."""
    return np.random.default_rng(0).integers(0, 1 << 30, (12, 2048, 2048), np.int32)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A step of 400 MB, by the size of its chunks."""

    @functools.cache
    def of(chunk_bytes: int) -> Path:
        folder = tmp_path_factory.mktemp("written")
        with ckptkit.Writer(folder, step=1, chunk_bytes=chunk_bytes) as writer:
            for number, value in enumerate(values()):
                writer.add(f"model/w{number}", value)
            writer.add("model/large", values().reshape(24576, 2048))
        return folder

    return of


@pytest.mark.parametrize(
    ("memory", "engine", "chunk_bytes"),
    [
        ("96MiB", "threads", 4 << 20),
        pytest.param("160MiB", "threads", 4 << 20, marks=pytest.mark.long),
        ("160MiB", "threads", 1 << 30),
        ("420MiB", "processes", 4 << 20),
    ],
)
def test_a_process_and_its_children_grow_by_less_than_the_cap(
    tmp_path: Path, written: Callable[[int], Path], memory: str, engine: str, chunk_bytes: int
) -> None:
    grown = measured(tmp_path, (written(chunk_bytes), tmp_path / "b"), memory, engine, {})
    assert grown <= int(memory.removesuffix("MiB")) << 20
    with ckptkit.open(tmp_path / "b") as checkpoint:
        assert np.array_equal(checkpoint.read("model/w7"), values()[7])
        assert np.array_equal(checkpoint.read("model/large"), values().reshape(24576, 2048))


# What a bucket adds is in every run: test_remote.py has what sinks are told that they may keep, and
# tests/storage/test_object_sinks.py measures that they keep no more.
@pytest.mark.long
@pytest.mark.parametrize(("memory", "engine"), [("160MiB", "threads")])
def test_the_cap_holds_from_one_bucket_to_another(
    tmp_path: Path, bucket: Bucket, memory: str, engine: str
) -> None:
    state = {
        f"model/w{number}": Tensor(random_values((2048, 2048), seed=number), {"fsdp": "shard(0)"})
        for number in range(12)
    }
    save(f"{bucket.url}/a", state, strategy="fsdp:16", storage_options=bucket.options)
    places = f"{bucket.url}/a", f"{bucket.url}/b"
    grown = measured(tmp_path, places, memory, engine, bucket.options)
    assert grown <= int(memory.removesuffix("MiB")) << 20
    with ckptkit.open(places[1], storage_options=bucket.options) as checkpoint:
        assert np.array_equal(
            checkpoint.read("model/w7").view("u4"), state["model/w7"].whole.view("u4")
        )
