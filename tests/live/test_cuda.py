"""What a GPU asks of saves and loads: copies that are those of the moment, whatever the streams do.

All of it is skipped without a GPU; `make test-gpu` runs it, and jobs of several ranks that share
one.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ckptkit
from ckptkit.live import Checkpointer, PerRank, load, rng_state, save, set_rng_state
from ckptkit.live.state.tensors import pinned_memory
from tests.live.test_async import held_up
from tests.live.test_tensors import DTYPES, bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

MEMORY: dict[str, Callable[[], torch.Tensor]] = {
    "a transpose": lambda: torch.arange(12.0, device="cuda").reshape(3, 4).T,
    "columns": lambda: torch.arange(20.0, device="cuda").reshape(4, 5)[:, 1:4],
    "every second": lambda: torch.arange(20.0, device="cuda")[::2],
    "channels last": lambda: (
        torch.arange(48.0, device="cuda").reshape(2, 3, 4, 2).to(memory_format=torch.channels_last)
    ),
    "conjugate": lambda: torch.arange(6, device="cuda").to(torch.complex64).mul(1j).conj(),
    "negative": lambda: torch.arange(6, device="cuda").to(torch.complex64).mul(1j).conj().imag,
}
LARGE = 64 << 20  # elements: copies of them take milliseconds


def busy(cycles: int = 200_000_000) -> None:
    """Keep the current stream from going on for a tenth of a second or so."""
    torch.cuda._sleep(cycles)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("source", "target"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_a_dtype_comes_back_to_any_device(
    tmp_path: Path, dtype: torch.dtype, source: str, target: str
) -> None:
    for shape in [(), (0,), (3, 0, 2), (5, 3)]:
        saved = torch.randint(0, 2, shape).to(dtype)
        save(tmp_path, step=1, state={"s": {"x": saved.to(source)}}, overwrite=True)
        found = torch.zeros(shape).to(dtype).to(target)
        load(tmp_path, state={"s": {"x": found}})
        assert bits(found.cpu()) == bits(saved)


@pytest.mark.parametrize("kind", MEMORY)
def test_memory_of_any_order_is_saved_and_filled(tmp_path: Path, kind: str) -> None:
    saved = MEMORY[kind]()
    save(tmp_path, step=1, state={"s": {"x": saved}})
    with ckptkit.open(tmp_path) as step:
        assert step.read("s/x").tolist() == saved.tolist()
    target = MEMORY[kind]().zero_()
    load(tmp_path, state={"s": {"x": target}})
    assert target.tolist() == saved.tolist()


def test_a_large_conjugate_is_turned_before_it_is_copied(tmp_path: Path) -> None:
    real = torch.arange(float(LARGE // 4), device="cuda")
    saved = torch.complex(real, real).conj()
    save(tmp_path, step=1, state={"s": {"x": saved}})
    target = torch.zeros_like(saved).resolve_conj()
    load(tmp_path, state={"s": {"x": target}})
    assert torch.equal(torch.view_as_real(target), torch.view_as_real(saved.resolve_conj()))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_another_stream_still_writes_is_saved_as_it_will_be(
    tmp_path: Path, *, asynchronous: bool
) -> None:
    tensor, side = torch.zeros(LARGE, device="cuda"), torch.cuda.Stream()
    with Checkpointer(tmp_path, asynchronous=asynchronous) as checkpointer:
        for value in (1.0, 2.0):  # the second into memory that the first has used
            with torch.cuda.stream(side):
                busy()
                tensor.fill_(value)
            checkpointer.save(int(value), state={"s": {"x": tensor}})
            tensor.fill_(-1)
    for value in (1.0, 2.0):
        found = torch.empty(LARGE)
        load(f"{tmp_path}/step-000000000{int(value)}", state={"s": {"x": found}})
        assert bool((found == value).all())


def test_what_another_stream_still_writes_does_not_overwrite_a_load(tmp_path: Path) -> None:
    tensor, side = torch.ones(LARGE, device="cuda"), torch.cuda.Stream()
    save(tmp_path, step=1, state={"s": {"x": tensor}})
    with torch.cuda.stream(side):
        busy()
        tensor.fill_(-1)
    load(tmp_path, state={"s": {"x": tensor}})
    with torch.cuda.stream(side):  # which knows nothing of the one that loaded
        assert bool((tensor == 1).all())


class Training:
    """A model with tied weights, in two dtypes, and a tensor that AdamW keeps on the device."""

    def __init__(self, seed: int, *, fused: bool, device: str = "cuda") -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Embedding(97, 64), nn.Linear(64, 256), nn.Dropout(0.1), nn.ReLU(), nn.Linear(256, 64)
        )
        head = nn.Linear(64, 97, bias=False)
        head.weight = self.model[0].weight  # type: ignore[assignment]
        self.model.append(head).to(device)
        self.model[1].to(torch.bfloat16)
        self.device = device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=fused)

    def train(self, steps: range) -> list[float]:
        """The losses of some steps."""
        found = []
        for step in steps:
            words = torch.randint(
                0, 97, (64, 17), generator=torch.Generator().manual_seed(step)
            ).to(self.device)
            with torch.autocast(self.device, torch.bfloat16):
                scores = self.model(words[:, :-1])
            loss = nn.functional.cross_entropy(scores.float().flatten(0, 1), words[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            found.append(float(loss.detach()))
        return found

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors."""
        found = dict(self.model.state_dict())
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}/{key}": value for key, value in state.items()}
        return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}


@pytest.mark.parametrize("fused", [False, True])
def test_a_resumed_training_goes_on_to_the_bit(tmp_path: Path, *, fused: bool) -> None:
    first = Training(0, fused=fused)
    first.train(range(5))
    with Checkpointer(tmp_path, asynchronous=True) as checkpointer:
        extra = {"random": PerRank(rng_state())}
        checkpointer.save(5, model=first.model, optimizer=first.optimizer, extra=extra)
        wanted = first.train(range(5, 10))
    again = Training(1, fused=fused)
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore(model=again.model, optimizer=again.optimizer)
    assert restored is not None
    assert restored.report.is_exact
    set_rng_state(restored.extra["random"])
    assert again.train(range(5, 10)) == wanted
    for name, tensor in first.state().items():
        assert bits(again.state()[name]) == bits(tensor), name


class Norms(torch.optim.SGD):
    """Keeps the norm of each gradient, where the gradient is."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """The norms are added up in place."""
        for parameter in (p for group in self.param_groups for p in group["params"]):
            kept = self.state[parameter].setdefault("norm", parameter.new_zeros(()))
            kept.add_(parameter.grad.norm())
        return super().step(closure)


def test_what_an_optimizer_counts_lies_where_its_saved_options_want_it(tmp_path: Path) -> None:
    for source, target in ((True, False), (False, True)):
        first, other = Training(0, fused=source), Training(1, fused=target)
        first.train(range(2))
        run = tmp_path / str(source)
        save(run, step=2, model=first.model, optimizer=first.optimizer)
        load(run, model=other.model, optimizer=other.optimizer)
        first.model.eval()  # without random numbers
        other.model.eval()
        assert other.train(range(2, 4)) == first.train(range(2, 4))
    first, other = Training(0, fused=False), Training(1, fused=False)
    for each in (first, other):
        each.optimizer = Norms(each.model.parameters(), lr=0.01)  # type: ignore[assignment]
    first.train(range(2))
    save(tmp_path / "norms", step=2, model=first.model, optimizer=first.optimizer)
    load(tmp_path / "norms", model=other.model, optimizer=other.optimizer)
    assert len(other.train(range(2, 4))) == 2


def test_what_was_saved_on_one_device_is_loaded_on_another(tmp_path: Path) -> None:
    for source, target in (("cuda", "cpu"), ("cpu", "cuda")):
        first = Training(0, fused=False, device=source)
        first.train(range(2))
        run = tmp_path / source
        save(run, step=2, model=first.model, optimizer=first.optimizer)
        other = Training(1, fused=False, device=target)
        report = load(run, model=other.model, optimizer=other.optimizer).report
        assert report.is_exact, str(report)
        found, wanted = other.state(), first.state()
        assert found.keys() == wanted.keys()
        assert all(bits(found[name]) == bits(wanted[name]) for name in wanted)
        assert all(p.device.type == target for p in other.model.parameters())


def test_training_that_goes_on_during_the_write_changes_nothing_of_it(tmp_path: Path) -> None:
    tensors = {f"{n}": torch.zeros(LARGE // 8, device="cuda") for n in range(8)}
    taken: list[int] = []

    def count(size: int) -> torch.Tensor:
        taken.append(size)
        return pinned_memory(size)

    with (
        patch("ckptkit.live.state.tensors.pinned_memory", count),
        Checkpointer(tmp_path, asynchronous=True) as checkpointer,
    ):
        for step in range(1, 5):
            for number, tensor in enumerate(tensors.values()):
                tensor.fill_(100 * step + number)
            with held_up() as go:
                checkpointer.save(step, state={"s": tensors})
                for tensor in tensors.values():
                    tensor.add_(0.5)
                torch.cuda.synchronize()
                go.set()
                checkpointer.wait()
        memory = checkpointer._last._memory
        assert memory is not None
        assert memory.is_pinned()
        assert memory.nbytes == 4 * LARGE  # exactly, and no power of two
    assert len(taken) == 1  # all saves use it
    for step in range(1, 5):
        with ckptkit.open(f"{tmp_path}/step-000000000{step}") as saved:
            for number in range(8):
                assert (saved.read(f"s/{number}") == 100 * step + number).all()


def test_pinned_memory_is_given_back_and_can_be_pinned_again() -> None:
    for size in (1, 4096, 5 << 20, (64 << 20) + 1):
        for _ in range(3):
            memory = pinned_memory(size)
            assert memory.is_pinned()
            assert memory.nbytes == size
            part = memory[size // 2 :]
            del memory
            gc.collect()
            assert part.is_pinned()  # for as long as anybody sees a part of it
            del part


class Numbers:
    """A dataset."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, number: int) -> int:
        return number


def test_workers_of_a_loader_may_be_forked_at_any_time(tmp_path: Path) -> None:
    tensor, mixed = torch.zeros(LARGE // 4, device="cuda"), torch.zeros(1000)
    with Checkpointer(tmp_path, asynchronous=True) as checkpointer:
        for step in range(1, 4):
            tensor.fill_(step)
            mixed.fill_(step)
            checkpointer.save(step, state={"s": {"x": tensor, "y": mixed}})
            loader: Any = DataLoader(Numbers(), num_workers=2)  # type: ignore[arg-type]
            assert sum(int(each) for each in loader) == sum(range(32))
    for step in range(1, 4):
        with ckptkit.open(f"{tmp_path}/step-000000000{step}") as saved:
            assert (saved.read("s/x") == step).all()
            assert (saved.read("s/y") == step).all()


def test_random_numbers_go_on(tmp_path: Path) -> None:
    torch.manual_seed(3)
    torch.rand(5, device="cuda")
    save(tmp_path, step=1, extra={"random": PerRank(rng_state())})
    wanted = torch.rand(7, device="cuda"), torch.rand(7)
    torch.manual_seed(4)
    set_rng_state(load(tmp_path).extra["random"])
    assert torch.equal(torch.rand(7, device="cuda"), wanted[0])
    assert torch.equal(torch.rand(7), wanted[1])


@pytest.mark.parametrize("place", ["folder", "memory"])
def test_tiers_keep_what_a_device_had(tmp_path: Path, place: str) -> None:
    far = str(tmp_path / "far") if place == "folder" else f"memory://{tmp_path.name}"
    tensor = torch.zeros(LARGE // 16, device="cuda")
    with Checkpointer(far, local=tmp_path / "near", asynchronous=True) as checkpointer:
        for step in range(1, 4):
            tensor.fill_(step)
            checkpointer.save(step, state={"s": {"x": tensor}})
            tensor.fill_(-step)
        checkpointer.wait()
        found = torch.zeros_like(tensor)
        assert checkpointer.restore(state={"s": {"x": found}})
        assert bool((found == 3).all())


def test_a_save_of_cast_and_loaded_dtypes(tmp_path: Path) -> None:
    saved = torch.randn(LARGE // 16, device="cuda", dtype=torch.bfloat16)
    save(tmp_path, step=1, state={"s": {"x": saved}})
    found = torch.zeros(saved.shape, device="cuda")
    load(tmp_path, state={"s": {"x": found}}, cast=True)
    assert torch.equal(found, saved.float())


JOB = """
import os, signal, sys
from ckptkit.live import Checkpointer, PerRank, rng_state, set_rng_state
from tests.live.test_cuda import Training
run, dies = sys.argv[1], int(sys.argv[2])
training = Training(7, fused=True)
with Checkpointer(run, asynchronous=True, on_sigterm="finish") as checkpointer:
    restored = checkpointer.restore(model=training.model, optimizer=training.optimizer)
    start = 0
    if restored is not None:
        start = restored.step
        set_rng_state(restored.extra["random"])
    for step in range(start, 12):
        print(step, training.train(range(step, step + 1))[0].hex(), flush=True)
        checkpointer.save(step + 1, model=training.model, optimizer=training.optimizer,
                          extra={"random": PerRank(rng_state())})
        if step == dies:
            os.kill(os.getpid(), int(sys.argv[3]))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_training_goes_on_with_the_same_losses(tmp_path: Path, how: int) -> None:
    def run(folder: str, dies: int) -> dict[str, str]:
        done = subprocess.run(
            [sys.executable, "-c", JOB, str(tmp_path / folder), f"{dies}", f"{int(how)}"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert (done.returncode == 0) is (dies < 0), done.stderr
        return dict(line.split() for line in done.stdout.splitlines())

    wanted = run("whole", -1)
    first = run("killed", 5)
    rest = run("killed", -1)
    assert len(wanted) == 12
    assert first | rest == wanted
    assert len(rest) < 12
