"""A framework that a plugin stands on: is it there, and the one that the plugin was made for?"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
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

    def private(self, owner: object, name: str) -> Any:
        """The attribute `name` of a module or a class of the framework."""
        try:
            return getattr(owner, name)
        except AttributeError as error:
            where = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", repr(owner))
            raise self._another(f"{where}.{name}") from error

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
