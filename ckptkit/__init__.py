"""Checkpoints of distributed training: fast to save, impossible to half-save, readable by
anyone.
"""

from __future__ import annotations

import sys

# `python -m ckptkit.cli` imports the package first: Ctrl-C is taken care of before anything else.
if sys.argv[:1] == ["-m"] and {"ckptkit.cli", "-mckptkit.cli"}.intersection(sys.orig_argv):
    import ckptkit_command  # noqa: F401

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckptkit.errors import CkptkitError
from ckptkit.version import __version__

if TYPE_CHECKING:
    from ckptkit.checkpoint.export.export import Exported, export
    from ckptkit.checkpoint.export.files import unpack
    from ckptkit.checkpoint.ranks import FileBarrier, Ranks, ThreadBarrier
    from ckptkit.checkpoint.read.checkpoint import Checkpoint
    from ckptkit.checkpoint.read.checkpoint import open_checkpoint as open  # noqa: A004
    from ckptkit.checkpoint.reshard.engines import commit_packs
    from ckptkit.checkpoint.reshard.plan import Resharded, ReshardPlan, plan_reshard, reshard
    from ckptkit.checkpoint.reshard.selection import Selection
    from ckptkit.checkpoint.reshard.target import Explained, explain_rules
    from ckptkit.checkpoint.run.diff import ArrayDifference, Diff, ObjectDifference, diff
    from ckptkit.checkpoint.run.run import Run
    from ckptkit.checkpoint.run.verify import Digest, Finding, digest, rebuild, verify
    from ckptkit.checkpoint.workers import ProgressBar
    from ckptkit.checkpoint.write.writer import Writer
    from ckptkit.format.objects import PerRank, Replicated, Split, Sum
    from ckptkit.model import Strategy
    from ckptkit.model.display import fold_names, natural_order
    from ckptkit.model.document import size_text, time_text
    from ckptkit.page import view
    from ckptkit.storage import open_store

# Each name is imported when it is first asked for: `ckpt ls` needs a tenth of them, and would take
# three times as long if it waited for all.
_MODULES = {
    "checkpoint.run.diff": ("ArrayDifference", "Diff", "ObjectDifference", "diff"),
    "checkpoint.run.verify": ("Digest", "Finding", "digest", "rebuild", "verify"),
    "checkpoint.export.export": ("Exported", "export"),
    "checkpoint.export.files": ("unpack",),
    "checkpoint.ranks": ("FileBarrier", "Ranks", "ThreadBarrier"),
    "checkpoint.read.checkpoint": ("Checkpoint", "open"),
    "checkpoint.reshard.engines": ("commit_packs",),
    "checkpoint.reshard.plan": ("ReshardPlan", "Resharded", "plan_reshard", "reshard"),
    "checkpoint.reshard.selection": ("Selection",),
    "checkpoint.reshard.target": ("Explained", "explain_rules"),
    "checkpoint.run.run": ("Run",),
    "checkpoint.workers": ("ProgressBar",),
    "checkpoint.write.writer": ("Writer",),
    "model.display": ("fold_names", "natural_order"),
    "format.objects": ("PerRank", "Replicated", "Split", "Sum"),
    "model": ("Strategy",),
    "model.document": ("size_text", "time_text"),
    "page": ("view",),
    "storage": ("open_store",),
}
# After `import ckptkit` alone too; those that need torch import it then.
_ROOMS = ("activation", "errors", "live", "model", "parallel", "storage")
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "ArrayDifference",
    "Checkpoint",
    "CkptkitError",
    "Diff",
    "Digest",
    "Explained",
    "Exported",
    "FileBarrier",
    "Finding",
    "ObjectDifference",
    "PerRank",
    "ProgressBar",
    "Ranks",
    "Replicated",
    "ReshardPlan",
    "Resharded",
    "Run",
    "Selection",
    "Split",
    "Strategy",
    "Sum",
    "ThreadBarrier",
    "Writer",
    "__version__",
    "commit_packs",
    "diff",
    "digest",
    "explain_rules",
    "export",
    "fold_names",
    "natural_order",
    "open",
    "open_store",
    "plan_reshard",
    "rebuild",
    "reshard",
    "size_text",
    "time_text",
    "unpack",
    "verify",
    "view",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"ckptkit.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"ckptkit.{_MODULE_OF[name]}")
    value = globals()[name] = getattr(module, "open_checkpoint" if name == "open" else name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "ckptkit_command" not in sys.modules:
    # Whoever imports ckptkit may open steps by zarr itself, which has to know our dtypes then.
    # `ckpt` registers them where it uses zarr, and mostly does not: importing that takes 0.2 s.
    from ckptkit.format.zarr import register as _register

    _register()
