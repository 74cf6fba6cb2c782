"""The names of `ckptkit.parallel` that users may rely on."""

from __future__ import annotations

from ckptkit import parallel


def test_all_is_what_there_is() -> None:
    own = {
        name
        for name, value in vars(parallel).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "").startswith("ckptkit.")
        and not isinstance(value, type(parallel))
    }
    assert own <= set(parallel.__all__)
    assert all(hasattr(parallel, name) for name in parallel.__all__)
    assert parallel.__all__ == sorted(parallel.__all__)
