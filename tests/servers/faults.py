"""What can go wrong between a client and a server, and the plan of when it does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from tests.servers.http_wire import Head

CONDITIONS = ("if-none-match", "if-match", "x-goog-if-generation-match")

_XML = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{code}: the test'
    " wants it so</Message><Resource>/</Resource><RequestId>0</RequestId></Error>"
)
CODES = {
    400: "RequestTimeout",
    403: "AccessDenied",
    429: "TooManyRequests",
    500: "InternalError",
    503: "SlowDown",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer in place of the server, which never sees the request."""

    status: int = 503
    code: str = ""

    @property
    def body(self) -> bytes:
        """As S3 says it."""
        return _XML.format(code=self.code or CODES[self.status]).encode()


@dataclass(frozen=True, slots=True)
class ResetUpload:
    """Reset the connection once so many bytes of the request's body have been passed on."""

    after: int = 0


@dataclass(frozen=True, slots=True)
class ResetDownload:
    """Reset the connection once so many bytes of the answer's body have been passed on."""

    after: int = 0


@dataclass(frozen=True, slots=True)
class Truncate:
    """Pass on only so many bytes of the answer's body; `honest` makes its length say so, as a
    broken cache would, and otherwise the connection just ends.
    """

    after: int = 0
    honest: bool = False


@dataclass(frozen=True, slots=True)
class FlipUpload:
    """Flip a bit of the request's body."""

    at: int = 0


@dataclass(frozen=True, slots=True)
class FlipDownload:
    """Flip a bit of the answer's body."""

    at: int = 0


@dataclass(frozen=True, slots=True)
class LoseAnswer:
    """Let the server do it, and close the connection before its answer comes through."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Take the request and never answer."""


@dataclass(frozen=True, slots=True)
class StallDownload:
    """Pass on so many bytes of the answer's body, and nothing more."""

    after: int = 0


@dataclass(frozen=True, slots=True)
class SlowDownload:
    """Pass on the answer's body in pieces, with a pause before each."""

    piece: int = 1000
    seconds: float = 0.1


@dataclass(frozen=True, slots=True)
class Delay:
    """Pass the request on later."""

    seconds: float = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """Pass the request on once the test lets it go; tell when it has come."""

    go: threading.Event = field(default_factory=threading.Event)
    come: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Strip:
    """Pass the request on without some headers: by default without the conditions of a write.

    A server that checks signatures refuses such a request; moto does not check.
    """

    headers: tuple[str, ...] = CONDITIONS


Fault: TypeAlias = (
    Answer
    | ResetUpload
    | ResetDownload
    | Truncate
    | FlipUpload
    | FlipDownload
    | LoseAnswer
    | Stall
    | StallDownload
    | SlowDownload
    | Delay
    | Hold
    | Strip
)
Match: TypeAlias = Callable[[Head], bool]


def everything(_: Head) -> bool:
    """Matches any request."""
    return True


def kind(*kinds: str, path: str = "", query: str = "") -> Match:
    """Matches requests of some kinds whose path and query contain something."""

    def matches(head: Head) -> bool:
        known = not kinds or head.kind in kinds
        return known and path in head.path and query in head.query

    return matches


@dataclass(frozen=True, slots=True)
class Rule:
    """A fault, and which of the requests that match meet it: after the first `skip` the next
    `times` (None: all), of those every `every`-th.
    """

    fault: Fault
    match: Match = everything
    skip: int = 0
    times: int | None = 1
    every: int = 1

    def meets(self, number: int) -> bool:
        """Whether the request with this number, from 0, of those that match meets the fault."""
        number -= self.skip
        if number < 0 or number % self.every:
            return False
        return self.times is None or number // self.every < self.times


class Plan:
    """The rules that a test set; of those that a request meets the first one counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[tuple[Rule, list[int]]] = []
        self._met: list[tuple[Fault, Head]] = []

    def add(self, rule: Rule) -> None:
        """Add a rule after those that are there."""
        with self._lock:
            self._rules.append((rule, [0]))

    def clear(self) -> None:
        """Forget all rules and what they did."""
        with self._lock:
            self._rules, self._met = [], []

    def fault_of(self, head: Head) -> Fault | None:
        """What a request meets."""
        found: Fault | None = None
        with self._lock:
            for rule, seen in self._rules:
                if rule.match(head):
                    if found is None and rule.meets(seen[0]):
                        found = rule.fault
                        self._met.append((found, head))
                    seen[0] += 1
        return found

    @property
    def met(self) -> list[tuple[Fault, Head]]:
        """The faults that happened, and to which requests."""
        with self._lock:
            return list(self._met)
