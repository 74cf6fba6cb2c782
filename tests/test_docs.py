"""What the pages under docs/ show runs as it stands there."""

from __future__ import annotations

import ast
import doctest
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ckptkit import activation, parallel
from ckptkit.errors import UsageError
from ckptkit.live import Checkpointer
from ckptkit.parallel import as_distributed, init, run_in_memory
from tests.live.pool import Pool

DOCS = Path(__file__).resolve().parents[1] / "docs"


def blocks(page: str) -> list[str]:
    """The programs of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def spread(how: str) -> nn.Module:
    """A small model, wrapped."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "fsdp1":
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(model, device_id=cpu, use_orig_params=True)
    if how == "fsdp2":
        fully_shard(model)
    return model


def run_state(how: str, folder: str) -> None:
    model = spread(how)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    names: dict[str, Any] = {"model": model, "optimizer": optimizer}
    for block in blocks("state.md"):
        exec(block.replace("runs/state", folder), names)
    rank = names["state"].rank
    assert (names["weights"] is None) == (rank > 0)
    assert names["state"].kind == "AdamW"
    assert (names["whole"] is None) == (rank > 0)
    assert str(names["strategy"]) == str(names["state"].strategy)


@pytest.mark.parametrize("how", ["plain", "ddp", "fsdp1", "fsdp2"])
def test_the_state_of_a_job_is_as_the_page_says(gloo: Pool, how: str, tmp_path: Path) -> None:
    gloo.run(1 if how == "plain" else 2, run_state, how, str(tmp_path))


def test_ranks_talk_as_the_page_says(tmp_path: Path) -> None:
    program = tmp_path / "page.py"
    program.write_text("\n".join(blocks("communication.md")))
    launch = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    )
    done = subprocess.run(
        [*launch, str(program)], capture_output=True, check=False, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    # Lines of two processes may come in one another.
    for part in ("gloo", " 0 2", " 1 2", "[3.0, 3.0, 3.0, 3.0]", "[2, 2]"):
        assert done.stdout.count(part) == (1 if part.startswith(" ") else 2)


def test_strategies_on_threads_are_refused_as_the_page_says() -> None:
    def spread_it(_: object) -> None:
        as_distributed(nn.Linear(2, 2), "ddp")

    with pytest.raises(UsageError, match="no process group of torch's"):
        run_in_memory(spread_it, world_size=2)


PUBLIC = [
    kind
    for door in (activation, parallel)
    for kind in map(vars(door).get, door.__all__)
    if isinstance(kind, type) and kind is not activation.Transport  # nobody makes one of those
]


@pytest.mark.parametrize("kind", PUBLIC)
def test_the_example_of_a_class_gives_what_it_says(
    kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    known = {**vars(activation), **vars(parallel), "torch": torch, "nn": nn}
    known["Checkpointer"] = Checkpointer
    (found,) = doctest.DocTestFinder(recurse=False).find(kind, globs=known)
    assert found.examples
    try:
        assert doctest.DocTestRunner().run(found).failed == 0
    finally:
        if dist.is_initialized():  # some begin a job of one rank
            init().close()


def test_every_program_of_a_page_can_be_read() -> None:
    for page in DOCS.glob("*.md"):
        for block in blocks(page.name):
            ast.parse(block)


def test_the_readme_leads_to_every_page() -> None:
    readme = (DOCS.parent / "README.md").read_text()
    assert [page.name for page in DOCS.glob("*.md") if f"(docs/{page.name})" not in readme] == []
