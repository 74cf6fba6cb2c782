"""`view`: a step, and what it is compared with or would become, as one HTML file that needs no
other.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from importlib.resources import files
from typing import Any

from ckptkit.checkpoint.check.state import diff
from ckptkit.checkpoint.places import Place, store_at
from ckptkit.checkpoint.read.checkpoint import open_checkpoint
from ckptkit.checkpoint.read.stream import STREAM_MEMORY, Limits
from ckptkit.checkpoint.reshard.plan import plan_reshard
from ckptkit.checkpoint.rules_file import RulesLike
from ckptkit.checkpoint.run.run import Run
from ckptkit.checkpoint.workers import Progress, uncollected
from ckptkit.errors import UsageError
from ckptkit.model import Strategy
from ckptkit.model.document import parse_size
from ckptkit.page.facts import (
    Facts,
    diff_facts,
    flows_of,
    plan_facts,
    run_facts,
    statistics_of,
    step_facts,
)
from ckptkit.storage import MemoryStore, Options
from ckptkit.version import __version__

# In this order they are one script.
SCRIPTS = ("base", "cuts", "charts", "mesh", "overview", "tree", "tensor", "reshard", "compare")


@uncollected()
def view(  # noqa: PLR0913 — one keyword for each decision, all with defaults
    location: Place,
    *,
    against: Place | None = None,
    to: str | Strategy | None = None,
    stats: bool = False,
    rules: RulesLike | None = None,
    sizes: Mapping[str, Any] | None = None,
    replicate_unknown: bool = False,
    allow_split_heads: bool = False,
    memory: int | str = STREAM_MEMORY,
    progress: Progress | None = None,
    storage_options: Options | None = None,
) -> str:
    """One HTML page that shows a step (of a run: its newest, and the others on a time line), or
    what another program saved. It needs no other file, and asks for nothing.

    With `to` it shows what `reshard` to that strategy would move (`rules` and so on are as there),
    with `against` what differs from another step, as `diff` finds it, and with `stats` what the
    numbers of each array are like. The last two read all values, every chunk checked, in `memory`;
    else only the manifest is read.
    """
    if to is None and (rules is not None or sizes or replicate_unknown or allow_split_heads):
        raise UsageError(
            "rules and sizes say how a reshard would cut, and none is asked for",
            hint="name its strategy: to=, on the command line --to",
        )
    with ExitStack() as stack:
        store = store_at(location, storage_options)
        checkpoint = stack.enter_context(open_checkpoint(store))
        facts: Facts = {"ckptkit": __version__, "step": step_facts(checkpoint)}
        # Where it was found in a run.
        facts["run"] = run_facts(checkpoint, Run(store)) if checkpoint.prefix else None
        if to is not None:
            plan = plan_reshard(
                checkpoint.place,
                MemoryStore(),
                to=to,
                rules=rules,
                sizes=sizes,
                replicate_unknown=replicate_unknown,
                allow_split_heads=allow_split_heads,
            )
            stack.enter_context(plan.checkpoint)
            facts["plan"] = {**plan_facts(plan), "flows": flows_of(plan)}
        if against is not None:
            other = store_at(against, storage_options)
            found = diff(checkpoint.place, other, memory=memory, progress=progress)
            facts["diff"] = diff_facts(found, stack.enter_context(open_checkpoint(other)))
        if stats:
            limits = Limits.of(parse_size(memory), None, sources=[checkpoint])
            facts["statistics"] = statistics_of(checkpoint, limits, progress)
        return page_of(facts)


def page_of(facts: Facts) -> str:
    """The page of some facts: it runs its own script, and nothing that they say."""
    style, script = _sources()
    # Plain ASCII without a < in it: nothing in a name can end the element.
    text = json.dumps(facts, separators=(",", ":"), allow_nan=False).encode()
    data = base64.b64encode(zlib.compress(text, 9)).decode()
    parts = {
        "POLICY": f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'",
        "STYLE": style,
        "DATA": data,
        "SCRIPT": script,
    }
    page = _source("page.html")
    for name, part in parts.items():
        page = page.replace(f"@{name}@", part, 1)
    return page


def _hash(text: str) -> str:
    """What a policy calls an element with this text."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@cache
def _sources() -> tuple[str, str]:
    """The style and the script."""
    scripts = [_source(f"{name}.js") for name in SCRIPTS]
    return _source("page.css"), '"use strict";\n' + "\n".join(scripts)


def _source(name: str) -> str:
    return files("ckptkit.page").joinpath("web", name).read_text(encoding="utf-8")
