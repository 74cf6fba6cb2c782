"""Pages of `ckpt view`: how long they take to make, how large they are, how soon they open."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import numpy as np

import ckptkit
from benchmarks.planning import manifest_of
from benchmarks.ranks import isolated
from benchmarks.reshard import RULES
from benchmarks.table import Bar, Section
from ckptkit.checkpoint.places import MANIFEST, step_name
from tests.page.browser import Browser, program

_LARGE, _MIDDLE, _SMALL = "fsdp:1024,tp:8", "tp:8,pp:16", 10_000
_LIMIT, _SECONDS = 2.0, 2.0
_VIEWS = {"overview": "", "arrays": "2", "reshard": "3"}


def pages(folder: Path, repeat: int) -> Section:
    """Of 405B parameters on 8,192 ranks, and of 10,000 arrays of which no two are alike."""
    made = {
        f"405B, {_LARGE}, --to {_MIDDLE}": isolated(_large, folder / "large"),
        f"{_SMALL:,} arrays, --to fsdp:2 --stats": isolated(_many, folder / "many"),
    }
    rows, bars = [], []
    for what, (page, seconds) in made.items():
        size, opened = page.stat().st_size, _opened(page, folder / "browser", repeat)
        open_in = [f"{median(opened[view]):.2f}" if opened else "no browser" for view in _VIEWS]
        rows.append([what, f"{seconds:.1f}", f"{size / 1e6:.2f}", *open_in])
        bars.append(Bar(f"page of {what}: size", size / 1e6, _LIMIT, at_least=False, unit="MB"))
        if opened:
            slowest = max(map(median, opened.values()))
            bars.append(Bar(f"page of {what}: opens", slowest, _SECONDS, at_least=False, unit="s"))
    columns = ["page", "made in s", "MB", *(f"{view} in s" for view in _VIEWS)]
    note = (
        "The first view from the start of loading, the others from the key. The step of 405B "
        "parameters has a manifest and no packs, which a page without --stats does not read."
    )
    return Section("Pages of ckpt view", columns, rows, bars, [note])


def _large(run: Path) -> tuple[Path, float]:
    place = run / step_name(1)
    place.mkdir(parents=True)
    (place / MANIFEST).write_bytes(manifest_of(_LARGE).to_bytes())
    began = time.perf_counter()
    return _write(run, ckptkit.view(run, to=_MIDDLE, rules=RULES), began)


def _many(run: Path) -> tuple[Path, float]:
    rng = np.random.default_rng(0)
    with ckptkit.Writer(run, step=1) as writer:
        for _ in range(_SMALL):
            name = "".join(map(chr, rng.integers(ord("a"), ord("z") + 1, 24)))
            values = rng.standard_normal(tuple(rng.integers(1, 40, 2)), np.float32)
            writer.add(f"model/{name[:8]}.{name[8:16]}.{name[16:]}", values)
    began = time.perf_counter()
    return _write(run, ckptkit.view(run, to="fsdp:2", stats=True), began)


def _write(run: Path, page: str, began: float) -> tuple[Path, float]:
    path = run / "page.html"
    path.write_text(page, encoding="utf-8")
    return path, time.perf_counter() - began


def _opened(page: Path, folder: Path, repeat: int) -> dict[str, list[float]]:
    """The seconds until each view is drawn; nothing where there is no browser."""
    if program() is None:
        return {}
    found: dict[str, list[float]] = {view: [] for view in _VIEWS}
    for _ in range(repeat):
        with Browser(folder) as browser:
            for view, key in _VIEWS.items():
                began = time.perf_counter()
                if key:
                    browser.key(key)
                else:
                    browser.open(page)
                browser.settle()
                found[view].append(time.perf_counter() - began)
    return found
