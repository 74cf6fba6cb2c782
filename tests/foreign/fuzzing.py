"""Hostile checkpoints of other programs: recorded ones, changed in a few places.

`python -m tests.foreign.fuzzing FIRST COUNT` makes so many, the first of this number.
"""

from __future__ import annotations

import contextlib
import io
import random
import re
import sys
import zipfile
from pathlib import Path

import ckptkit
from ckptkit.errors import CkptkitError
from tests.checkpoint.saving import memory_with
from tests.foreign.test_pickles import OPCODES
from tests.fuzzing import main

Files = dict[str, bytes]

RECORDED = Path(__file__).parent / "frameworks"
# What is near an end of a file is mostly metadata: a directory, a header.
NEAR = 2048
NUMBERS = (b"0", b"-1", b"1.5", b"4294967296", b"9223372036854775807", b"1" * 400, b"null", b"true")
TEXTS = (b"..", b"a/../b", b"/x", b"", b"\xff", b"\\u0000", b"\xc3\xa9", b"[" * 300, b"{}", b"[]")
SIZES = (0, 1, 255, 2**16 - 1, 2**31, 2**32 - 1)


def bases() -> list[Files]:
    """The recorded checkpoints, each as the files of one folder."""
    found: dict[tuple[str, str], Files] = {}
    for archive in sorted(RECORDED.glob("*.zip")):
        with zipfile.ZipFile(archive) as file:
            for name in file.namelist():
                case, _, key = name.partition("/")
                if key and not name.endswith("/"):
                    found.setdefault((archive.stem, case), {})[key] = file.read(name)
    return [found[case] for case in sorted(found)]


def regions(data: bytes) -> list[tuple[int, int]]:
    """Where the metadata of a file is."""
    if data[:4] != b"PK\3\4":
        return [(0, min(len(data), NEAR)), (max(0, len(data) - NEAR), len(data))]
    found = [(0, min(len(data), 128)), (max(0, len(data) - NEAR), len(data))]
    with contextlib.suppress(zipfile.BadZipFile, ValueError, NotImplementedError):
        for item in zipfile.ZipFile(io.BytesIO(data)).infolist():
            if item.filename.endswith("data.pkl"):
                start = item.header_offset + 30 + len(item.filename)
                found += [(start, start + item.file_size + 64)] * 4
    return found


def changed(data: bytes, dice: random.Random) -> bytes:
    """A file with some bytes other than they were."""
    if not data:
        return b"x"
    begin, end = dice.choice(regions(data))
    edited = bytearray(data)
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(begin, max(begin + 1, min(end, len(edited))))
        length = dice.randint(1, 8)
        match dice.randrange(8):
            case 0:
                edited[at] = dice.randrange(256)
            case 1:
                edited[at] = dice.choice(OPCODES)
            case 2:
                other = dice.randrange(begin, max(begin + 1, min(end, len(edited))))
                edited[at : at + length] = edited[other : other + length].ljust(length, b"\0")
            case 3:
                edited[at : at + 4] = dice.choice(SIZES).to_bytes(4, "little")
            case 4:
                del edited[at : at + length]
            case 5:
                edited[at:at] = edited[at : at + length] * dice.randint(1, 50)
            case 6:  # a number of JSON or YAML
                numbers = [m.span() for m in re.finditer(rb"(?<=[ :\[,])-?\d+", edited[begin:end])]
                if numbers:
                    a, b = dice.choice(numbers)
                    edited[begin + a : begin + b] = dice.choice(NUMBERS)
            case 7:
                texts = [m.span(1) for m in re.finditer(rb'"([^"]{0,80})"', edited[begin:end])]
                if texts:
                    a, b = dice.choice(texts)
                    edited[begin + a : begin + b] = dice.choice(TEXTS)
        if not edited:
            break
    return bytes(edited)


def hostile(files: Files, dice: random.Random) -> Files:
    """A folder with a file or two changed, missing, cut short, or of another's name."""
    found = dict(files)
    for _ in range(dice.randint(1, 2)):
        keys = sorted(found)
        if not keys:
            break
        # Where small files are metadata, and large ones tensors.
        key = min(dice.sample(keys, min(3, len(keys))), key=lambda key: len(found[key]))
        match dice.randrange(12):
            case 0:
                del found[key]
            case 1:
                found[key] = found[key][: dice.randrange(len(found[key]) + 1)]
            case 2:
                other = dice.choice(keys)
                found[key], found[other] = found[other], found[key]
            case 3:
                name = re.sub(r"\d+", lambda _: str(dice.choice([0, 1, 7, 10**8])), key, count=1)
                found[name] = found.pop(key)
            case _:
                found[key] = changed(found[key], dice)
    return found


def look_at(files: Files) -> None:
    """Everything that reads a foreign checkpoint; opened once, which is most of the time."""
    with ckptkit.open(memory_with(files)) as checkpoint:
        dict(checkpoint.objects)
        for name in checkpoint.arrays:
            with contextlib.suppress(CkptkitError):
                checkpoint.read(name)


if __name__ == "__main__":
    CASES = bases()

    def warm() -> None:
        for files in CASES:
            look_at(files)

    sys.exit(main(warm, lambda dice: look_at(hostile(dice.choice(CASES), dice)), wall=600))
