"""One browser for all tests of pages, where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.page.browser import Browser, program


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if program() is None:
        pytest.skip("the browser suite did not run: install Debian's package chromium")
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser, tmp_path: Path) -> Iterator[Browser]:
    """The browser, which must have nothing to say and ask for nothing but the page."""
    chromium.resize(1280, 900)
    chromium.prefer("light")
    yield chromium
    assert not chromium.said
    assert chromium.asked <= {path.as_uri() for path in tmp_path.glob("*.html")}
