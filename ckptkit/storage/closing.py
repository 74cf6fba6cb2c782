"""What is closed at the end of a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """A `with` block gives the thing itself, and closes it however the block ends."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds; closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
