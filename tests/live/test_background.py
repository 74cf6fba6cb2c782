from __future__ import annotations

import os
import sys
import threading

import pytest

from ckptkit.live.background import Background

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere priorities are those of whole processes"
)


def test_what_runs_in_the_background_gives_way_and_so_do_its_threads() -> None:
    found: dict[str, int] = {}

    def look(who: str) -> None:
        found[who] = os.getpriority(os.PRIO_PROCESS, 0)

    def work() -> None:
        look("work")
        thread = threading.Thread(target=look, args=("its thread",))
        thread.start()
        thread.join()

    look("before")
    background = Background()
    background.run(work, "step 1")
    background.wait()
    look("after")
    assert found["before"] == found["after"]
    assert found["work"] == found["its thread"] == min(19, found["before"] + 5)
