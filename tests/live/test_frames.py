"""Who follows a call down to the first byte reads at most eight functions."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch import nn

import ckptkit
from ckptkit.live import Checkpointer

MOST = 8
HOME = Path(ckptkit.__file__).parent
# What lets threads share out work is one function, however it does that.
INSIDE = ("share_out.<locals>", "look_until")


def functions(frame: FrameType | None) -> list[str]:
    """Our functions from the outermost to the one of this frame."""
    found = []
    while frame is not None:
        code = frame.f_code
        if HOME in Path(code.co_filename).parents and not code.co_qualname.startswith(INSIDE):
            found.append(code.co_qualname)
        frame = frame.f_back
    return found[::-1]


@pytest.fixture
def down_to(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], object]], list[str]]:
    """The functions on the way from a call to the first time that it calls `os.NAME` for a pack."""

    def followed(name: str, call: Callable[[], object]) -> list[str]:
        seen: list[list[str]] = []
        main, plain = threading.get_ident(), getattr(os, name)

        def noting(descriptor: int, *given: Any) -> Any:
            if not seen and Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".zip":
                here = functions(sys._getframe(1))
                is_thread = threading.get_ident() != main
                above = functions(sys._current_frames()[main]) if is_thread else []
                seen.append([*above, *here])
            return plain(descriptor, *given)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, noting)
            call()
        return seen[0]

    return followed


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_byte_is_followed_in_few_functions(
    down_to: Callable[[str, Callable[[], object]], list[str]], tmp_path: Path
) -> None:
    model, run = nn.Linear(8, 8), tmp_path / "run"
    with Checkpointer(run) as checkpointer:
        saved = down_to("pwritev", lambda: checkpointer.save(1, model=model))
        loaded = down_to("preadv", lambda: checkpointer.restore(model=model))
    new = tmp_path / "new"
    resharded = down_to("pwritev", lambda: ckptkit.reshard(run, new, to="fsdp:2"))
    with ckptkit.open(new) as checkpoint:
        read = down_to("preadv", lambda: checkpoint["model/weight"][:])
    assert (saved[0], loaded[0]) == ("Checkpointer.save", "Checkpointer.restore")
    assert (resharded[0], read[0]) == ("reshard", "Array.__getitem__")
    for way in (saved, loaded, resharded, read):
        assert len(way) <= MOST, " -> ".join(way)
