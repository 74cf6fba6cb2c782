"""A run on a server behind a proxy that breaks things, and what has to hold whatever broke."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import pytest

import ckptkit
from ckptkit import CkptkitError, Run, Writer
from ckptkit.checkpoint.places import step_name
from ckptkit.errors import PeerError
from ckptkit.storage import Store, open_store
from tests.checkpoint.saving import (
    State,
    Tensor,
    add,
    assert_holds,
    outcomes,
    random_values,
    small_state,
)
from tests.servers.proxy import Proxy
from tests.servers.s3_server import Bucket, S3Server

T = TypeVar("T")

ENGINES = ("obstore", "fsspec")
MIB = 1 << 20
# The least that servers take as a part, so that little data makes several.
PART = 5 * MIB
PATIENT: Mapping[str, object] = {
    "timeout": 1.0,
    "deadline": 60.0,
    "part_size": PART,
    "concurrency": 4,
}
HASTY = {**PATIENT, "timeout": 1.0, "deadline": 4.0}
# On a machine at rest nothing here takes a tenth of it; what hangs takes longer.
NEVER = 240.0
FIRST = small_state()
NEXT = small_state(seed=7)
LARGE = {"model/w": Tensor(random_values((2, 6 * MIB // 4), "float32", 3), {"fsdp": "shard(0)"})}


def all_and_some(names: Iterable[str], some: Iterable[str]) -> pytest.MarkDecorator:
    """Faults under obstore, and under fsspec some: all of them in long tests."""
    names = tuple(names)
    return pytest.mark.parametrize(
        ("engine", "names"),
        [
            ("obstore", names),
            ("fsspec", tuple(some)),
            pytest.param("fsspec", names, marks=pytest.mark.long),
        ],
        ids=lambda value: value if isinstance(value, str) else f"of {len(value)}",
    )


@dataclass(frozen=True)
class Scene:
    """A run in a bucket, reached directly or through the proxy."""

    bucket: Bucket
    proxy: Proxy
    engine: str
    name: str = "run"
    pace: Mapping[str, object] = field(default_factory=lambda: PATIENT)

    def store(self) -> Store:
        """The run through the proxy."""
        options = self.bucket.through(self.proxy.endpoint, **self.pace, engine=self.engine)
        return open_store(f"{self.bucket.url}/{self.name}", options)

    def direct(self) -> Store:
        """The run as it really is."""
        return open_store(f"{self.bucket.url}/{self.name}", self.bucket.options)

    def connect(self) -> None:
        """Begin a session, which takes time that nobody has later."""
        for _ in range(9):
            with suppress(CkptkitError):
                Run(self.store()).steps()
                return
        Run(self.store()).steps()

    def begin(self) -> None:
        """Save step 1, undisturbed."""
        assert save(self.direct(), 1, FIRST) == []

    def save(self, state: State = NEXT, *, step: int = 2) -> list[BaseException]:
        """Save through the proxy by two ranks: what went wrong, which is a clear error if any."""
        store = self.store()
        errors = finished(lambda: save(store, step, state))
        for error in errors:
            assert_clear(error)
        return errors

    def assert_steps(
        self, certain: Mapping[int, State], possible: Mapping[int, State] | None = None
    ) -> None:
        """Of the steps all that are certain are committed, of the others none but possible ones,
        and whatever is committed is whole.
        """
        states = {**(possible or {}), **certain}
        there = set(Run(self.direct()).steps())
        assert set(certain) <= there <= set(states)
        for step in there:
            assert_whole(self.bucket, f"{self.name}/{step_name(step)}", states[step])


def cases(table: Iterable[str], *both: str) -> list[tuple[str, str]]:
    """Engines and names of a table: all of it by the default engine, and what the engines do by
    themselves by the other one too.
    """
    return [*(("obstore", name) for name in table), *(("fsspec", name) for name in both)]


_numbers = count()


@contextmanager
def scene_of(server: S3Server, bucket: Bucket, engine: str) -> Iterator[Scene]:
    """A run of its own behind a proxy of its own, for those that wait side by side."""
    # Its name says nothing: faults are for the requests whose paths have certain words.
    with Proxy(server.endpoint) as proxy:
        scene = Scene(bucket, proxy, engine, f"run-{next(_numbers)}", HASTY)
        scene.begin()
        scene.connect()
        yield scene


def side_by_side(names: Iterable[str], test: Callable[[str], None]) -> None:
    """Run a test for each name, all at once for they mostly wait; a failure says the names."""
    wrong: dict[str, BaseException] = {}

    def one(name: str) -> None:
        try:
            test(name)
        except BaseException as error:  # noqa: BLE001 — told with its name
            wrong[name] = error

    with ThreadPoolExecutor(10) as threads:
        list(threads.map(one, names))
    for name, error in wrong.items():
        raise AssertionError(f"{name} (of {sorted(wrong)}): {error}") from error


def assert_whole(bucket: Bucket, folder: str, state: State) -> None:
    """A committed step verifies, and holds what it should."""
    url = f"{bucket.url}/{folder}"
    assert ckptkit.verify(url, storage_options=bucket.options) == []
    with ckptkit.open(url, storage_options=bucket.options) as checkpoint:
        assert_holds(checkpoint, state)


def save(
    place: Any, step: int, state: State, strategy: str = "fsdp:2", **more: Any
) -> list[BaseException]:
    """Save whole tensors by two ranks; what went wrong."""

    def fill(writer: Writer) -> None:
        for name, tensor in state.items():
            add(writer, name, tensor)

    found = outcomes(place, fill, strategy=strategy, step=step, timeout=NEVER / 2, **more)
    return [error for error in found if error is not None]


def cause_of(errors: list[BaseException]) -> BaseException:
    """The error of the rank that failed by itself."""
    return next((error for error in errors if not isinstance(error, PeerError)), errors[0])


def assert_clear(error: BaseException) -> None:
    """An error of ours that says what and where."""
    assert isinstance(error, CkptkitError), repr(error)
    assert error.what
    assert error.where or isinstance(error, PeerError), repr(error)


def finished(do: Callable[[], T]) -> T:
    """What `do` returns or raises; a failure where it hangs."""
    outcome: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((do(), None))
        except BaseException as error:  # noqa: BLE001 — handed to the test
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(NEVER)
    assert outcome, "it hangs"
    value, error = outcome[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def error_of(do: Callable[[], object]) -> CkptkitError | None:
    """The error that `do` ends in, if any."""
    try:
        finished(do)
    except CkptkitError as error:
        return error
    return None


def at_fault(proxy: Proxy, do: Callable[[], T]) -> T:
    """What `do` returns when it meets a fault. On a busy machine nothing may be in time, so that it
    ends before it comes to that: then it is called again.
    """
    for _ in range(9):
        found = do()
        if proxy.met:
            return found
    raise AssertionError("it never came to the fault")
