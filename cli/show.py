"""`ckpt show`: a step as one plain document, which `--json` gives as it is, and as lines: a head,
then its arrays as a tree, one line for those that are alike. And `ckpt view`: a step as one HTML
file to look at, and to send to others.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import translate
from math import prod
from pathlib import Path
from shlex import quote
from typing import Any, TypeAlias

import click
from ckptkit.cli.options import (
    Options,
    array_names,
    command,
    location,
    memory,
    option,
    rules_options,
    split_heads,
    steps,
    storage,
    strategy,
)
from ckptkit.cli.output import (
    CORRUPT,
    Bar,
    Reply,
    aligned,
    counted,
    in_short,
    json_value,
    keeping,
)

import ckptkit
from ckptkit.errors import NotFoundError, StorageError, UsageError, nearest

Doc: TypeAlias = dict[str, Any]
Row: TypeAlias = tuple[str, ...]

_BOXES_SHOWN = 4
_FOLDED = re.compile(r"\{([0-9]{1,18}(?:(?:,|\.\.|,\.\.,)[0-9]{1,18})*)\}")
_SPARE = (4, 2, 5)  # role, dtype, parts: what a narrow terminal does without, in this order
_SEMANTICS = {
    "replicated": "",
    "per_rank": ", by rank",
    "sum": ", to be summed",
    "split": ", to be shared out",
}


@command(
    "ckpt show runs/7b",
    "ckpt show runs/7b/step-0000001000 'model/*.wq.*' --rank 3",
    codes=[CORRUPT],
)
@location("step")
@click.argument("pattern", required=False, shell_complete=array_names)
@option("--rank R", "Show what this rank holds.", least=0)
@option("--all", "A line for every array, alike ones too.", into="each")
@option("--mapping", "Show what another program calls each array.")
@storage
def show(
    step: str,
    pattern: str | None,
    rank: int | None,
    *,
    each: bool,
    mapping: bool,
    storage_options: Options | None,
) -> Reply:
    """Show what is in STEP: strategy, arrays, objects.

    Each array has a line: name, dtype, shape, role, how many different parts it is cut into and the
    shape of the first, bytes. Layers that are alike share one, with the bytes of all of them:
    layers.{0..31}.norm.weight. PATTERN, with * and ?, picks arrays by their whole name, or is such
    a name of alike ones. With --rank the lines are of this rank alone: the shape of its part, and
    the boxes it is made of.

    STEP may be what another program wrote: its format is named then, and with --mapping each line
    is the name of an array here and there.
    """
    with keeping(), ckptkit.open(step, storage_options=storage_options) as checkpoint:
        if mapping and checkpoint.foreign is None:
            raise UsageError(
                "ckptkit wrote this step: its arrays have no other names",
                where=checkpoint.location,
                hint="leave --mapping out",
            )
        doc = describe(checkpoint, pattern, rank)

    def lines() -> Iterator[str]:
        with keeping():
            if not mapping:
                yield from lines_of(doc, each=each)
                return
            theirs = {array["name"]: array["theirs"] for array in doc["arrays"]}
            names = [(name, theirs[name]) for name in ckptkit.natural_order(theirs)]
            yield from aligned([("NAME", "IN ITS FILES"), *names])

    return Reply(doc, lines())


def describe(
    checkpoint: ckptkit.Checkpoint, pattern: str | None = None, rank: int | None = None
) -> Doc:
    """The whole document, with the arrays that match a pattern and what a rank holds of them."""
    arrays, strategy = _arrays(checkpoint, pattern, rank), checkpoint.strategy
    foreign, axes = checkpoint.foreign, strategy.mesh.axes
    packs = len(checkpoint.manifest.packs) if foreign is None else len(foreign.files)
    is_known = foreign is None or foreign.strategy is not None
    stored = [array for array in arrays if array["alias_of"] is None]
    held = None
    if rank is not None:
        names = [axis.name for axis in axes]
        coords = dict(zip(names, strategy.mesh.coords(rank), strict=True))
        nbytes = sum(array["part"]["bytes"] for array in stored)
        held = {"rank": rank, "coords": coords, "bytes": nbytes}
    return {
        "location": checkpoint.location,
        "step": checkpoint.step,
        "time": ckptkit.time_text(checkpoint.time),
        "save_id": checkpoint.save_id,
        "writer": checkpoint.manifest.save.writer,
        "format": None if foreign is None else foreign.format,
        "strategy": {
            "text": str(strategy),
            "world_size": strategy.world_size,
            "axes": [{"name": a.name, "kind": a.kind, "size": a.size} for a in axes],
        }
        if is_known
        else None,
        "details": json_value(dict(checkpoint.details)),
        "packs": packs,
        "stored_bytes": checkpoint.stored_bytes,
        "bytes": sum(array["bytes"] for array in stored),
        "rank": held,
        "arrays": arrays,
        "objects": [
            {"name": item.name, "semantics": item.semantics, "value": json_value(item.value)}
            for item in checkpoint.manifest.objects
        ],
    }


def _meant(names: Iterable[str], pattern: str) -> list[str]:
    """The names that are meant: by * and ?, and by {0..3,8} as alike names are shown."""
    # Of many runs the ones in the middle are shown as `..` alone.
    texts = (text.replace(",..,", "..").split(",") for text in _FOLDED.findall(pattern))
    spans = [[[int(end) for end in run.split("..")] for run in runs] for runs in texts]
    # No name has the character that stands for a number.
    glob = _FOLDED.sub("\0", pattern).replace("[", "[[]")
    numbered = translate(glob).replace("\0", "([0-9]+)")
    find = re.compile(numbered).match
    return [
        name
        for name in names
        if (match := find(name))
        and all(
            any(run[0] <= int(number) <= run[-1] for run in runs)
            for number, runs in zip(match.groups(), spans, strict=True)
        )
    ]


def _arrays(checkpoint: ckptkit.Checkpoint, pattern: str | None, rank: int | None) -> list[Doc]:
    names: Iterable[str] = checkpoint.names
    if pattern is not None:
        names = _meant(names, pattern)
        if not names:
            guess = nearest(pattern, checkpoint.names, 3)
            raise NotFoundError(
                "no array of such a name",
                where=checkpoint.location,
                value=pattern,
                hint=f"{guess}`ckpt show {quote(checkpoint.location)}` lists them;"
                " * stands for any text",
            )
    is_foreign = checkpoint.foreign is not None
    theirs = {} if checkpoint.foreign is None else checkpoint.foreign.theirs
    known, found = dict[int, Doc](), list[Doc]()
    for name in names:
        info = checkpoint.info(name)
        # What is the same for all that are alike is worked out once.
        kind = id(info.kind)
        if kind not in known:
            known[kind] = _of_kind(checkpoint[name], rank)
        found.append(
            {
                "name": name,
                "theirs": theirs.get(name, name) if is_foreign else None,
                "alias_of": None if info.name == name else info.name,
                "of": info.of,
                **known[kind],
            }
        )
    return found


def _of_kind(array: Any, rank: int | None) -> Doc:
    """The fields that do not depend on names."""
    info, layout, held = array.info, array.layout, None
    first = layout.part(layout.first_rank)
    axes = [axis.name for axis in layout.strategy.mesh.axes]
    if rank is not None:
        part = array.part(rank)
        held = {
            "shape": part.shape,
            "boxes": [{"offset": box.offset, "shape": box.shape} for box in part.boxes],
            "bytes": sum(box.size for box in part.boxes) * array.dtype.itemsize,
        }
    return {
        "shape": info.shape,
        "dtype": info.dtype.name,
        "role": info.role,
        "bytes": info.nbytes,
        "chunks": info.grid.chunk_count,
        "placements": dict(zip(axes, map(str, layout.placements), strict=True)),
        "parts": {
            "count": sum(1 for _ in layout.distinct_ranks()),
            "shape": first.shape,
            "boxes": len(first.boxes),
        },
        "part": held,
    }


def lines_of(doc: Doc, *, each: bool) -> list[str]:
    """The document for people; with `each` alike arrays have a line each."""
    by_rank = doc["rank"] is not None
    arrays = [a for a in doc["arrays"] if a["part"]["boxes"]] if by_rank else doc["arrays"]
    names = [array["name"] for array in arrays]
    # What has one document of its parts has the same cells: layers are alike.
    cells: dict[Row, int] = {}
    known: dict[tuple[Any, ...], int] = {}
    kinds: list[int] = []
    for array in arrays:
        parts = array["alias_of"], id(array["parts"])
        if parts not in known:
            row = _part_cells(array) if by_rank else _whole_cells(array)
            known[parts] = cells.setdefault(row, len(cells))
        kinds.append(known[parts])
    row_of = list(cells)
    if each:
        place = {name: number for number, name in enumerate(names)}
        rows = [(name, [place[name]]) for name in ckptkit.natural_order(names)]
    else:
        rows = [(name, places) for name, places in ckptkit.fold_names(names, kinds)]
    lines = []
    for name, places in rows:
        first = arrays[places[0]]
        nbytes = first["part"]["bytes"] if by_rank else first["bytes"]
        is_stored = first["alias_of"] is None
        count = f"{len(places)} x" if len(places) > 1 else ""
        total = nbytes * len(places) if is_stored else None
        lines.append((name, total, (count, *row_of[kinds[places[0]]])))
    head = aligned(_head(doc, len(arrays), len(lines)))
    return [*head, "", *_tree(lines, "BOXES" if by_rank else "PARTS")]


def _head(doc: Doc, shown: int, lines: int) -> list[Row]:
    strategy, rank = doc["strategy"], doc["rank"]
    written_by = "unknown: the files do not say it"
    if strategy is not None:
        axes = []
        for axis in strategy["axes"]:
            kind = "" if axis["name"] == axis["kind"] else f" ({axis['kind']})"
            axes.append(f"{axis['name']}{kind} {axis['size']}")
        ranks = counted(strategy["world_size"], "rank") + (f": {' x '.join(axes)}" if axes else "")
        written_by = f"{strategy['text']} ({ranks})"
    what = "pack" if doc["format"] is None else "file"
    size = f"{ckptkit.size_text(doc['stored_bytes'])} in {counted(doc['packs'], what)}"
    rows: list[Row] = [("step", str(doc["step"])), ("where", doc["location"])]
    if doc["format"] is None:
        rows.append(("saved", f"{doc['time'] or 'at no date'} by {doc['writer']}"))
    else:
        rows.append(("format", f"{doc['format']}, which has no checksums"))
        rows.append(("saved", doc["time"] or "at no date"))
    rows += [("strategy", written_by), ("size", size)]
    if lines < shown:
        rows.append(
            (
                "arrays",
                f"{shown} in {counted(lines, 'line')}, as layers are alike; --all shows each",
            )
        )
    if rank is not None:
        at = ", ".join(f"{axis} {coord}" for axis, coord in rank["coords"].items())
        held = f"holds {ckptkit.size_text(rank['bytes'])} of {counted(shown, 'array')}"
        rows.append(("rank", f"{rank['rank']} {f'({at}) ' if at else ''}{held}"))
    details = [f"{name} = {in_short(value)}" for name, value in doc["details"].items()]
    objects = [
        f"{item['name']}{_SEMANTICS[item['semantics']]} = {in_short(item['value'])}"
        for item in doc["objects"]
    ]
    for title, items in (("details", details), ("objects", objects)):
        rows += [("" if number else title, item) for number, item in enumerate(items)]
    return rows


def _tree(named: Sequence[tuple[str, int | None, Row]], parts: str) -> list[str]:
    """The lines of rows with a name and, unless they are stored elsewhere, bytes: as a tree."""
    direct: Counter[str] = Counter()
    for name, nbytes, _ in named:
        direct[name.rpartition("/")[0]] += nbytes or 0
    totals: Counter[str] = Counter()
    for group, nbytes in direct.items():
        while group:
            totals[group] += nbytes
            group = group.rpartition("/")[0]  # noqa: PLW2901 - upwards
    rows: list[Row] = [("NAME", "", "DTYPE", "SHAPE", "ROLE", parts, "SIZE")]
    bars = [0.0]
    largest = max((nbytes or 0 for _, nbytes, _ in named), default=0) or 1
    texts: dict[int | None, str] = {None: ""}
    before, indent = "", ""
    for name, nbytes, cells in named:
        group, _, leaf = name.rpartition("/")
        if group != before:
            groups = group.split("/") if group else []
            for depth, node in enumerate(groups):
                path = "/".join(groups[: depth + 1])
                if not f"{before}/".startswith(f"{path}/"):
                    size = ckptkit.size_text(totals[path])
                    rows.append((f"{'  ' * depth}{node}/", "", "", "", "", "", size))
                    bars.append(0)
            before, indent = group, "  " * len(groups)
        if nbytes not in texts:
            texts[nbytes] = ckptkit.size_text(nbytes or 0)
        rows.append((indent + leaf, *cells, texts[nbytes]))
        bars.append((nbytes or 0) / largest)
    return aligned(rows, right=[1, 6], spare=_SPARE, is_cut=True, bars=bars)


def _whole_cells(array: Doc) -> Row:
    shape, parts = array["shape"], array["parts"]
    if array["alias_of"] is not None:
        cut = f"= {array['alias_of']}"
    elif not array["bytes"]:
        cut = "empty"
    elif parts["count"] == 1 and parts["shape"] == shape:
        cut = "whole"
    else:
        boxes = f" in {parts['boxes']} boxes" if parts["boxes"] > 1 else ""
        cut = f"{parts['count']} x {parts['shape']}{boxes}"
    return (array["dtype"], str(shape), array["role"], cut)


def _part_cells(array: Doc) -> Row:
    part = array["part"]
    boxes = []
    for box in part["boxes"][:_BOXES_SHOWN]:
        spans = zip(box["offset"], box["shape"], array["shape"], strict=True)
        boxes.append(
            f"[{', '.join(':' if n == whole else f'{a}:{a + n}' for a, n, whole in spans)}]"
        )
    if len(part["boxes"]) > _BOXES_SHOWN:
        boxes.append(f"+{len(part['boxes']) - _BOXES_SHOWN}")
    where = "whole" if prod(part["shape"]) == prod(array["shape"]) else " ".join(boxes)
    return (array["dtype"], str(part["shape"]), array["role"], where)


@command(
    "ckpt view runs/7b --open",
    "ckpt view runs/7b --to tp:4 --config config.json -o 7b.html",
    "ckpt view runs/7b --against runs/7b/step-0000001000 --stats -o 7b.html",
    codes=[CORRUPT],
)
@location("step")
@option("--against OTHER", "Show what differs from this step, too.", shell_complete=steps)
@strategy("Show what a reshard would move, too.")
@option("--stats", "Show what the numbers are like; reads all of them.")
@option("-o --out FILE", "Write the page there.", type=click.Path())
@option("--open", "Show the page in a browser.", into="to_open")
@rules_options
@split_heads
@memory()
@storage
def view(step: str, *, out: str | None, to_open: bool, **given: Any) -> Reply:
    """Show STEP as a page in a browser.

    The page is one file that needs no other, no server and no network: who holds what, as pictures
    of the mesh and of each array, sizes by layer, the packs, and the steps of the run. STEP may be
    what another program wrote.

    With --to it also shows what `ckpt reshard` would move, where --rules, --config and the others
    are as there; with --against what `ckpt diff` finds; with --stats smallest, largest and mean
    values, zeros, NaNs and a histogram of each array. --against and --stats read all values, and
    check them; else only the manifest is read.
    """
    if not out and not to_open:
        raise UsageError("nowhere to put the page", hint="say -o FILE.html, or --open")
    place, total = _place(out) if out else None, 0
    if times := given["stats"] + (given["against"] is not None):  # that all values are read
        with ckptkit.open(step, storage_options=given["storage_options"]) as checkpoint:
            total = checkpoint.stored_bytes * times
    with Bar("view", total) as bar:
        page = ckptkit.view(step, progress=bar, **given)
    import webbrowser  # noqa: PLC0415 — as below, of what `ckpt show` has no need

    path = _written(page, place, step)
    remarks = []
    if to_open and not webbrowser.open(path.as_uri()):
        remarks.append(f"no browser could be started; open {path} in one")
    return Reply({"file": str(path), "bytes": path.stat().st_size}, [str(path)], remarks)


def _place(out: str) -> Path:
    """Where the page will be; what is in its way is told before all values are read."""
    path, what = Path(out).absolute(), None
    try:
        # What /dev/stdout leads to may be a plain file: to replace the link would harm the system.
        is_open = path.is_symlink() and path.readlink().is_relative_to("/proc")
        if not path.parent.is_dir():
            what = "there is no such folder"
        elif path.is_dir():
            what = "a folder has its name"
        elif is_open or (path.exists() and not path.is_file()):
            what = "what has its name is no plain file"
    except OSError as error:
        raise _refused(path, error.strerror) from error
    if what is not None:
        raise _refused(path, what)
    return path


def _written(page: str, place: Path | None, step: str) -> Path:
    """Where the page is. It replaces what has its name, and follows no link.

    Without a place it is a file that the next look at the same step replaces: a browser may read it
    long after the command has ended, so nobody could delete it.
    """
    import tempfile  # noqa: PLC0415

    user = os.getuid()
    try:
        path = place
        if path is None:
            folder = Path(tempfile.gettempdir(), f"ckpt-view-{user}")
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o22:
                folder = Path(tempfile.mkdtemp(prefix="ckpt-view-"))  # somebody else has the name
            name = step if "://" in step else os.path.abspath(step)  # noqa: PTH100 — a link stays one
            digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()
            path = folder / f"{digest[:16]}.html"
        # As short as a name may have to be, and of no other writer of this page.
        begun = path.with_name(f".{secrets.token_hex(8)}")
        with begun.open("x", encoding="utf-8") as file:
            try:
                file.write(page)
                file.close()
                begun.replace(path)
            except BaseException:
                begun.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise _refused(place or Path(tempfile.gettempdir()), error.strerror) from error
    return path


def _refused(path: Path, why: str | None) -> StorageError:
    return StorageError(
        f"the page cannot be written: {why}",
        where=str(path),
        hint="name another file with -o",
    )
