"""A framework that a plugin stands on: is it there, and the one that the plugin was made for?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from types import ModuleType
from typing import Any

from ckptkit.errors import UsageError


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
