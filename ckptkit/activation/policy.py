"""What is done with the activations of a model's blocks, as people write it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckptkit.errors import UsageError
from ckptkit.model.document import parse_size

_PLAIN = ("full", "selective", "offload", "partition")
_HINT = f"there are {', '.join(_PLAIN)}, every:2 and budget:2GiB"
_MOST_EVERY = 999_999
_EVERY = re.compile(r"every:([1-9]\d{0,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Policy:
    """One of "full", "every:n", "selective", "budget:2GiB", "offload" and "partition".

    >>> Policy.parse("every:2")
    Policy(kind='every', every=2, budget=0)
    """

    kind: str
    every: int = 1
    """Of "every:n": the first of how many blocks is recomputed."""
    budget: int = 0
    """Of "budget:X": the bytes that activations may take."""

    def __post_init__(self) -> None:
        if self.kind not in (*_PLAIN, "every", "budget"):
            raise UsageError("no policy for activations", value=self.kind, hint=_HINT)
        most = _MOST_EVERY if self.kind == "every" else 1
        if type(self.every) is not int or not 1 <= self.every <= most:
            raise UsageError("not every so many blocks", where=self.kind, value=self.every)
        is_budget = self.kind == "budget"
        if type(self.budget) is not int or self.budget < 0 or (self.budget > 0) != is_budget:
            raise UsageError("not a budget of bytes", where=self.kind, value=self.budget)

    @classmethod
    def parse(cls, text: str | Policy) -> Policy:
        """The policy that a text means."""
        if isinstance(text, Policy):
            return text
        if text in _PLAIN:
            return cls(text)
        if match := _EVERY.fullmatch(str(text)):
            return cls("every", every=int(match[1]))
        if str(text).startswith("budget:"):
            return cls("budget", budget=parse_size(text.removeprefix("budget:")))
        raise UsageError("no policy for activations", value=text, hint=_HINT)

    def __str__(self) -> str:
        if self.kind == "every":
            return f"every:{self.every}"
        return f"budget:{self.budget}" if self.kind == "budget" else self.kind
