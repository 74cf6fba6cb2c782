"""Two jobs that save one step at once, and what must come of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import ckptkit
from ckptkit.storage import Store
from tests.checkpoint.saving import State, same
from tests.faults.scene import cause_of, finished, save


def race(
    stores: Sequence[Store], states: Sequence[State], *, step: int = 2
) -> list[BaseException | None]:
    """What each job raised, None where it saved the step."""
    start = threading.Barrier(len(stores))
    outcomes: list[BaseException | None] = [None] * len(stores)

    def job(number: int) -> None:
        start.wait()
        errors = save(stores[number], step, states[number])
        outcomes[number] = cause_of(errors) if errors else None

    def all_jobs() -> None:
        threads = [threading.Thread(target=job, args=(n,)) for n in range(len(stores))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    finished(all_jobs)
    return outcomes


def holder(store: Store, states: Sequence[State], *, step: int = 2) -> int:
    """Whose step it is: it verifies, and all of it is the state of one job."""
    with ckptkit.Run(store).open(step) as checkpoint:
        assert ckptkit.verify(f"{checkpoint.location}", storage_options=store.address.options) == []
        fits = [
            number
            for number, state in enumerate(states)
            if all(same(checkpoint.read(name), state[name].whole) for name in state)
        ]
    (found,) = fits
    return found
