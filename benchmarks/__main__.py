"""`python -m benchmarks`: measure, print the tables, say which bars are met."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from benchmarks import (
    activation,
    foreign,
    gpu,
    live,
    objects,
    optimizers,
    reshard,
    speed,
    strategies,
)
from benchmarks.commands import commands
from benchmarks.machine import describe, in_words
from benchmarks.manifest import manifest
from benchmarks.many import COUNTS, many
from benchmarks.memory import memory
from benchmarks.pages import pages
from benchmarks.planning import planning
from benchmarks.ranks import isolated
from benchmarks.scale import listing, ranks
from benchmarks.servers import running
from benchmarks.slices import slices
from benchmarks.table import Section, bars_text

RESULTS = Path(__file__).with_name("results")

_WHAT = {
    "save": "of 1 and 2 processes",
    "load": "by 1 and 2 processes",
    "cold": "loads by 1 and 2 processes from a cold page cache",
    "live": "in a training job: FSDP2, tensor parallelism, asynchronous saves",
    "reshard": "offline, against copying and the peer's converter",
    "foreign": "checkpoints of other programs: exports, loads, `ckpt show`",
    "objects": "over an object store on this machine, against obstore itself and DCP",
    "activation": "of a GPT under each policy, against torch's own checkpoint",
    "cuda": "saves, loads and activations of a GPU",
    "optimizers": "bytes of compressed gradients, steps that wait for nobody",
    "strategies": "in one line, against torch by hand; grouping; what each takes",
    "plan": "reshards of 405B parameters",
    "slice": "column slices",
    "scale": "many arrays, chunks and ranks",
    "commands": "their start",
    "many": "small arrays, 1,000 to 100,000",
    "view": "pages of 405B parameters and of 10,000 arrays, in a browser",
    "memory": "at its peak",
    "all": "the default",
}

Bench = Callable[[], Section]


def main() -> None:
    """Run what was asked for."""
    arguments = _arguments()
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=arguments.folder))
    machine = describe(folder)
    print(f"# Benchmarks\n\n{in_words(machine)}\n", flush=True)
    sections: list[Section] = []
    try:
        for bench in _benches(arguments, folder):
            sections.append(bench())
            print(sections[-1].to_text(), "\n", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    bars = bars_text(sections)
    print(bars)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    text = [f"# Benchmarks\n\n{in_words(machine)}", bars, *(s.to_text() for s in sections)]
    markdown = arguments.json.with_suffix(".md")
    markdown.write_text("\n\n".join(text) + "\n", encoding="utf-8")
    doc = {"machine": machine, "sections": [section.to_doc() for section in sections]}
    arguments.json.write_text(json.dumps(doc, indent=1, ensure_ascii=False), encoding="utf-8")


def _benches(arguments: argparse.Namespace, folder: Path) -> Iterator[Bench]:
    gib, repeat = arguments.gib, arguments.repeat
    known: dict[str, Iterable[Bench]] = {
        "save": [partial(speed.save, folder, gib, repeat, count) for count in (1, 2)],
        "load": [partial(speed.load, folder, gib, repeat, count) for count in (1, 2)],
        "cold": [partial(speed.load, folder, gib, repeat, count, is_cold=True) for count in (1, 2)],
        "live": live.benches(folder, gib, repeat),
        "reshard": reshard.benches(folder, repeat),
        "foreign": foreign.benches(folder, gib, repeat),
        "objects": objects.benches(folder, repeat, arguments.server, gib),
        "activation": activation.benches(repeat),
        "cuda": gpu.benches(folder, gib, repeat),
        "strategies": strategies.benches(repeat),
        "optimizers": optimizers.benches(),
        "plan": [planning],
        "slice": [partial(isolated, slices, folder, gib)],
        "scale": [partial(listing, folder, repeat), partial(manifest, folder), ranks],
        "commands": [partial(commands, folder, repeat)],
        "many": [partial(many, folder, repeat, _up_to(arguments.arrays))],
        "view": [partial(pages, folder, repeat)],
        "memory": [partial(memory, folder, gib)],
    }
    for name, benches in known.items():
        if arguments.what in (name, "all"):
            yield from benches


def _up_to(most: int) -> tuple[int, ...]:
    return (*(count for count in COUNTS if count < most), most)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    choices = ", ".join(f"{name} ({what})" for name, what in _WHAT.items())
    parser.add_argument("what", nargs="?", default="all", choices=_WHAT, help=choices)
    parser.add_argument(
        "--gib",
        type=float,
        default=1.6,
        help="least size of the state (default 1.6); below 0.5 of narrower layers, to try it out",
    )
    parser.add_argument(
        "--arrays", type=int, default=COUNTS[-1], help=f"the most of many (default {COUNTS[-1]})"
    )
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        choices=list(running()),
        help="over which object stores (default all); with --gib 0.25 one takes minutes",
    )
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each (default 3)")
    parser.add_argument(
        "--folder", type=Path, default=RESULTS, help="where the files go: the disk to measure"
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "results.json", metavar="FILE")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    return arguments


if __name__ == "__main__":
    main()
