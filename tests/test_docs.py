"""What README and the pages under docs/ show runs as it stands there.

`test_every_block_of_a_page_runs` takes all blocks of a page: the programs, with small stand-ins for
the model and the data, and the sessions of a shell. A page without a way to run it fails.
"""

from __future__ import annotations

import doctest
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from contextlib import ExitStack, chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ckptkit import activation, open_store, parallel
from ckptkit.errors import UsageError
from ckptkit.live import Checkpointer
from ckptkit.parallel import as_distributed, init, run_in_memory
from tests.cli.programs import ckpt, document
from tests.live.pool import Pool
from tests.plugins.page import run_sections
from tests.servers.s3_server import Bucket

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *DOCS.glob("*.md"))}
SESSIONS = ("sh", "console")
WITH_A_RUN = ("README.md", "commands.md", "migration.md", "resharding.md", "storage.md")


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each block, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE)
    assert 2 * len(found) == len(re.findall(r"^\s*```", PAGES[page], re.MULTILINE))
    return found


def programs(page: str) -> list[str]:
    """Its blocks of Python."""
    return [text for language, text in blocks(page) if language == "python"]


def run(page: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the programs of a page one after another, and give what they have named."""
    for program in programs(page):
        exec(program, names)
    return names


class Network(nn.Module):
    """As small as a model can be."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.embed(inputs)
        return result


def training(model: nn.Module) -> dict[str, Any]:
    """What a loop has beside its Checkpointer."""
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)

    def train(step: int) -> int:
        model(torch.tensor([step % 8])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return 3

    train(0)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "train": train}


# What runs the programs of each page: in this process, or as jobs of the pool.


def run_readme(gloo: Pool) -> None:
    Path("loop").mkdir()
    with chdir("loop"):
        names = run("README.md", training(Network()))
        assert names["tokens"] == 6000
        names["train"] = None  # a second time there is nothing to do
        run("README.md", names)
    assert (names["step"], names["tokens"]) == (2000, 6000)


def train_on_a_rank(folder: str) -> None:
    cut = nn.ModuleDict({"wqkv": nn.Linear(2, 3072, bias=False)})  # half of the rows
    job = training(DistributedDataParallel(Network())) | {"cut_model": cut}
    with chdir(folder):
        names = run("training.md", job)
    (weight,) = names["weights"].values()
    assert torch.equal(weight, names["model"].module.embed.weight)
    assert names["everything"].keys() >= {"model", "optimizer"}


def run_training(gloo: Pool) -> None:
    gloo.run(2, train_on_a_rank, str(Path.cwd()))


def run_python(gloo: Pool) -> None:
    first, *others = programs("python.md")
    whole = np.random.default_rng(0).standard_normal((4096, 4096), np.float32)

    def write(rank: int) -> None:
        mine = {"my_rows": whole[512 * rank :][:512], "norm": whole[0], "my_tokens": 10}
        exec(first, {**mine, "rank": rank, "my_rng_state": bytes([rank])})

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names: dict[str, Any] = {}
    for program in others:
        exec(program, names)
    assert np.array_equal(names["columns"], whole[:, 1024:2048])
    assert np.array_equal(names["out"], whole[:1024])


def convert_on_a_rank(folder: str) -> None:
    job = training(Network())
    old = job["model"].embed.weight.detach().clone()
    weights, states = get_state_dict(job["model"], job["optimizer"])
    with chdir(folder):
        save_with_dcp({"model": weights, "optimizer": states}, checkpoint_id="old/step-1000")
        job["train"](1)
        run("from-dcp.md", job)
    assert torch.equal(job["model"].embed.weight, old)


def run_from_dcp(gloo: Pool) -> None:
    gloo.run(1, convert_on_a_rank, str(Path.cwd()))
    assert ckpt("show", "runs/from-dcp").exit_code == 0


def run_activations(gloo: Pool) -> None:
    layer = nn.TransformerEncoderLayer(4, 1, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    run("activations.md", {"model": model, "inputs": torch.ones(2, 3, 4)})


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


def state_on_a_rank(how: str, folder: str) -> None:
    model = spread(how)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with chdir(folder):
        names = run("state.md", {"model": model, "optimizer": optimizer})
    rank = names["state"].rank
    assert (names["weights"] is None) == (rank > 0)
    assert names["state"].kind == "AdamW"
    assert (names["whole"] is None) == (rank > 0)
    assert str(names["strategy"]) == str(names["state"].strategy)


def run_state(gloo: Pool) -> None:
    for how in ("plain", "ddp", "fsdp1", "fsdp2"):
        folder = Path(how)
        folder.mkdir()
        gloo.run(1 if how == "plain" else 2, state_on_a_rank, how, str(folder.absolute()))


def communicate_on_a_rank() -> str:
    with redirect_stdout(StringIO()) as printed:
        run("communication.md", {})["comm"].close()
    return printed.getvalue()


def run_communication(gloo: Pool) -> None:
    for rank, printed in enumerate(gloo.run(2, communicate_on_a_rank)):
        first, *others = printed.splitlines()
        assert first == f"gloo {rank} 2"
        assert others == ["[3.0, 3.0, 3.0, 3.0]", "[2, 2]"]


def strategies_on_a_rank(folder: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    batch = (torch.ones(4, 4), torch.ones(4, 2))
    names = {"model": model, "batches": [batch, batch], "loss_fn": nn.functional.mse_loss}
    with chdir(folder):
        assert run("strategies.md", names)["norm"] > 0


def run_strategies(gloo: Pool) -> None:
    gloo.run(2, strategies_on_a_rank, str(Path.cwd()))
    assert ckpt("show", "runs/7b").exit_code == 0


def optimizers_on_a_rank(folder: str) -> None:
    loss = nn.functional.mse_loss
    data = torch.ones(64, 4)
    common = {"torch": torch, "data": data, "loss": loss, "batches": [(data, data[:, :2])] * 2}
    common |= {"step": 1, "loss_of": lambda model, inputs: model(inputs).square().mean()}
    compressed, late, elastic = programs("optimizers.md")
    with chdir(folder), ExitStack() as stack:
        for number, program in enumerate((compressed, late, elastic.replace("10_000", "4"))):
            model: nn.Module = nn.Linear(4, 2)
            if program != late:
                model = DistributedDataParallel(model)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            checkpointer = stack.enter_context(Checkpointer(f"runs/{number}"))
            mine = {"model": model, "optimizer": optimizer, "checkpointer": checkpointer}
            exec(program, common | mine)


def run_optimizers(gloo: Pool) -> None:
    gloo.run(2, optimizers_on_a_rank, str(Path.cwd()))


def run_in_place(page: str) -> Callable[[Pool], None]:
    """The programs need no more than a run, or a model to save."""

    def run_it(_: Pool) -> None:
        run(page, training(Network()))

    return run_it


PROGRAMS: dict[str, Callable[[Pool], None]] = {
    "README.md": run_readme,
    "activations.md": run_activations,
    "communication.md": run_communication,
    "frameworks.md": lambda gloo: run_sections(PAGES["frameworks.md"], gloo),
    "from-dcp.md": run_from_dcp,
    "optimizers.md": run_optimizers,
    "python.md": run_python,
    "state.md": run_state,
    **{page: run_in_place(page) for page in ("migration.md", "resharding.md", "storage.md")},
    "strategies.md": run_strategies,
    "training.md": run_training,
}


# What runs the lines of a shell.


def run_session(text: str) -> None:
    """Each line with its command, and, where the block shows it, what that prints."""
    if "$ " not in text:
        for line in text.splitlines():
            run_line(line)
        return
    for line, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
        assert_shows(run_line(line), shown)


def run_line(line: str) -> str:
    """What a command prints that ends well."""
    words = shlex.split(line, comments=True)
    match words:
        case ["make", target]:  # to run these from here would be to run the tests within a test
            assert f"\n{target}: ## " in (ROOT / "Makefile").read_text()
        case ["pip", "install", what]:  # nothing is installed by a test
            known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            name = re.fullmatch(r"ckptkit\[(\w+)\]", what)
            assert name
            assert name[1] in known["optional-dependencies"]
        case ["export", *settings]:  # the test has its own
            assert all(f"`{each.partition('=')[0]}`" in PAGES["storage.md"] for each in settings)
        case ["torchrun", "--nproc-per-node", "4", program, "--strategy", strategy]:
            # tests/test_examples.py runs the program that does just that.
            assert (ROOT / program).exists()
            example = (ROOT / "examples" / "kill_and_resume.py").read_text()
            assert f'train(run, "{strategy}", ' in example
        case ["ckpt", "launch", *_] | ["mpirun", *_] | ["unzip", *_]:
            return by_bash(line)
        case ["ckpt", *arguments]:
            done = ckpt(*arguments)
            assert done.exit_code == 0, done.output
            return done.stdout
        case ["rm", path]:
            Path(path).unlink()
        case _:
            raise AssertionError(f"nothing runs {line!r}")
    return ""


def by_bash(line: str) -> str:
    """As it stands there, with the programs beside this Python."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    allowed = {  # Open MPI wants to be asked
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    done = subprocess.run(
        ["bash", "-c", line],
        env={**os.environ, **allowed, "PATH": path},
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_shows(printed: str, shown: str) -> None:
    """The lines of a block, in their order; `...` stands for any, and what a day, a folder or an
    id looks like does not matter.
    """
    varying = {
        re.escape(f"{Path.cwd()}/"): "/data/",
        r"\d{4}-\d\d-\d\dT[\d:]{8}Z": "<time>",
        r"\d{8}T\d{6}Z-[0-9a-f]{12}": "<save id>",
        r"at most [\d.]+ \w+, \d+ workers": "<memory>",
        r"about [\d.]+ \w+, by a short probe": "<seconds>",
        " +": " ",  # columns are as wide as their rows ask for
    }
    for pattern, name in varying.items():
        printed, shown = re.sub(pattern, name, printed), re.sub(pattern, name, shown)
    pattern = "".join(
        r"(?:.*\n)*?" if line == "..." else re.escape(line) + r"\n" for line in shown.splitlines()
    )
    assert re.fullmatch(pattern, printed), f"{shown}\nis not what is printed:\n{printed}"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What `ckpt demo DIR` leaves, and what it says."""
    folder = tmp_path_factory.mktemp("demo") / "here"
    return folder, document("demo", folder)


def test_a_demo_in_a_folder_that_was_named_stays(demo: tuple[Path, dict[str, Any]]) -> None:
    folder, found = demo
    assert found["ok"]
    assert {check["ok"] for check in found["checks"]} == {True}
    assert [command["exit"] for command in found["commands"]].count(3) == 1
    assert document("verify", folder / "run" / "step-0000000100")["ok"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in, with the files that sessions name."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text('{"head_dim": 8}')
    Path("train.py").write_text("print('step 100, loss 2.31')")
    return tmp_path


@pytest.fixture
def s3(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket that the environment leads to, as it would lead to Amazon's."""
    names = {"endpoint": "ENDPOINT_URL", "access_key": "ACCESS_KEY_ID", "region": "REGION"}
    for option, name in {**names, "secret_key": "SECRET_ACCESS_KEY"}.items():
        monkeypatch.setenv(f"AWS_{name}", str(bucket.options[option]))
    return bucket.url


def copy_demo(demo: Path, page: str, url: str | None) -> None:
    """The runs that the sessions of a page begin with."""
    shutil.copytree(demo / "run", "runs/7b")
    if page == "commands.md":
        shutil.copytree(demo / "resharded", "runs/7b-tp4")
    if url:
        store = open_store(f"{url}/runs/7b")
        for file in (demo / "run").rglob("*.*"):
            store.put(file.relative_to(demo / "run").as_posix(), file.read_bytes())


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_runs(
    page: str,
    place: Path,
    gloo: Pool,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = PAGES[page]
    url = request.getfixturevalue("s3") if "s3://bucket" in text else None
    if page in WITH_A_RUN:
        copy_demo(request.getfixturevalue("demo")[0], page, url and f"{url}/sessions")
    # Programs and sessions have each a place of its own in the bucket.
    monkeypatch.setitem(PAGES, page, text.replace("s3://bucket", f"{url}/programs"))
    if programs(page):
        PROGRAMS[page](gloo)
    monkeypatch.setitem(PAGES, page, text.replace("s3://bucket", f"{url}/sessions"))
    sessions = [block for language, block in blocks(page) if language in SESSIONS]
    for session in sessions:
        run_session(session)
    assert len(programs(page)) + len(sessions) == len(blocks(page)), "a block is left out"


def test_the_picture_of_a_step_is_what_its_program_draws() -> None:
    drawn = runpy.run_path(str(DOCS / "picture.py"))["picture"]()
    assert (DOCS / "step.svg").read_text() == drawn
    assert "(docs/step.svg)" in PAGES["README.md"]


def test_the_readme_is_read_in_three_minutes() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 150


def test_the_headlines_of_the_benchmarks_are_figures_of_theirs() -> None:
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    head, *sections = re.split(r"^## ", results, flags=re.MULTILINE)
    by_name = {section.partition("\n")[0]: section for section in sections}
    rows = re.findall(r"^\| (.*?) \| ([\d.]+) (x|B|MiB) \| (.*?) \|$", head, re.MULTILINE)
    assert rows
    for name, figure, unit, section in rows:
        pattern = rf"^\| {re.escape(name)} +\| +{figure} {unit} \|"
        assert re.search(pattern, by_name[section], re.MULTILINE), name
    (why,) = re.findall(r"^## Why\n(.*?)^## ", PAGES["README.md"], re.DOTALL | re.MULTILINE)
    assert {*re.findall(r"\d+\.\d+", why)} <= {*re.findall(r"\d+\.\d+", str(rows))}


def test_links_lead_somewhere() -> None:
    gone = [
        (page, link)
        for page, text in PAGES.items()
        for link in re.findall(r"\]\(([^)#]*)(?:#[^)]*)?\)", text)
        if not link.startswith("http")
        and not (ROOT if page == "README.md" else DOCS).joinpath(link).exists()
    ]
    assert gone == []


def test_tests_that_a_page_names_are_there() -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", PAGES["reliability.md"])
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_readme_leads_to_every_page() -> None:
    readme = PAGES["README.md"]
    assert [page for page in PAGES if page != "README.md" and f"(docs/{page})" not in readme] == []


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
