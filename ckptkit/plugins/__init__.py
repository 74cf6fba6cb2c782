"""ckptkit under the frameworks that people run: one module for each, which nothing else imports.

What plugins share is here: the framework that one stands on (is it there, and the one that the
plugin was made for?), the run that its caller names, and what both keep in a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from types import ModuleType
from typing import Any

from ckptkit.checkpoint.places import Place
from ckptkit.errors import UsageError
from ckptkit.live import Checkpointer


@dataclass(frozen=True)
class Framework:
    """A package, the version of it that its plugin was read from, and our extra that installs it.

    Whatever of a framework is not documented is taken through `private`: a release that lacks it is
    refused in one sentence, instead of failing somewhere in the middle of a save.
    """

    package: str
    made_for: str
    extra: str

    def module(self, name: str) -> ModuleType:
        """The module `name` of the framework."""
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if self._installed() is None:
                raise UsageError(
                    f"this plugin needs {self.package}, which is not installed",
                    hint=f"pip install 'ckptkit[{self.extra}]'",
                ) from error
            raise self._another(name) from error

    def private(self, owner: object, name: str, takes: Sequence[str] | None = None) -> Any:
        """The attribute `name` of a module, a class or an object of the framework; of a method also
        whether it `takes` these arguments, as one that we put in its place does.
        """
        try:
            found = getattr(owner, name)
        except AttributeError as error:
            of = owner if isinstance(owner, (type, ModuleType)) else type(owner)
            where = getattr(of, "__qualname__", of.__name__)
            raise self._another(f"{where}.{name}") from error
        if takes is not None:
            here = [each for each in signature(found).parameters if each != "self"]
            if here != list(takes):
                raise self._another(f"{found.__qualname__}({', '.join(takes)})")
        return found

    def check(self, needs: Mapping[str, Sequence[str]]) -> None:
        """Refuse another framework than one that has all this in its modules: names, such as
        `Storage.ls`; of methods that are called, or put in another's place, also what they take:
        `Storage.ls(path)`.
        """
        for module, names in needs.items():
            for name in names:
                path, is_called, takes = name.rstrip(")").partition("(")
                *owners, last = path.split(".")
                owner: Any = self.module(module)
                for each in owners:
                    owner = self.private(owner, each)
                arguments = [each for each in takes.split(", ") if each]
                self.private(owner, last, arguments if is_called else None)

    def _another(self, lacking: str) -> UsageError:
        return UsageError(
            f"made for {self.package} {self.made_for}, this is {self.package} {self._installed()}: "
            f"it has no {lacking}",
            hint=f"pip install '{self.package}=={self.made_for}.*', or a newer ckptkit",
        )

    def _installed(self) -> str | None:
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


@contextmanager
def opened(checkpoints: Checkpointer | Place, **options: Any) -> Iterator[Checkpointer]:
    """A Checkpointer, the caller's own or one with these options for the location that it gave."""
    if isinstance(checkpoints, Checkpointer):
        yield checkpoints
        return
    with Checkpointer(checkpoints, **options) as mine:
        yield mine


def extra_beside(
    own: Mapping[str, object], extra: Mapping[str, object] | None
) -> dict[str, object]:
    """What a plugin keeps for itself in a step, beside what its caller does."""
    if taken := own.keys() & (extra or {}):
        raise UsageError(
            "this name is the plugin's own",
            where="extra",
            value=min(taken),
            hint="choose another key",
        )
    return {**(extra or {}), **own}
