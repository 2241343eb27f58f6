"""A real browser without a window, for the tests of this folder: Chromium, driven by Selenium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsers import Browser

HERE = Path(__file__).parent
PROGRAMS = ("chromium", "chromedriver")
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars"
)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs a browser: skipped, with the reason, where there is none. One is enough."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("browser"))
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(missing)}: make testbed-packages"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Fresh for each file of tests."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    for word in OPTIONS.split():
        options.add_argument(word)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    options.binary_location = str(shutil.which("chromium"))
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    before = dict(os.environ)
    driver = Chrome(options, Service(str(shutil.which("chromedriver"))))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
