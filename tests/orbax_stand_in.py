"""What the script in docs/migration.md needs of JAX and Orbax, which are large. It was tried with
them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def orbax_with(leaves: dict[str, Any]) -> dict[str, Any]:
    """Modules by name, of an Orbax that restores these leaves wherever it looks."""
    tree = SimpleNamespace(map=lambda _, tree: tree, leaves_with_path=lambda tree: tree.items())
    keystr = SimpleNamespace(keystr=lambda path, **_: path)
    reader = SimpleNamespace(
        metadata=lambda _: SimpleNamespace(item_metadata=SimpleNamespace(tree=leaves)),
        restore=lambda _, restore_args: restore_args,
    )
    checkpoint = SimpleNamespace(PyTreeCheckpointer=lambda: reader, RestoreArgs=dict)
    return {
        "jax": SimpleNamespace(tree=tree, tree_util=keystr),
        "orbax": SimpleNamespace(checkpoint=checkpoint),
        "orbax.checkpoint": checkpoint,
    }
