"""A real browser for what a notebook would show: headless Chromium, driven by Playwright."""

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Dialog, Page, sync_playwright

__all__ = ["browser", "page", "watched"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_LOCAL = ("file:", "data:", "blob:", "about:")


# For one module, not for the session: while Playwright runs, its event loop does too, and no later test could start one.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium, started once for the tests of a module."""
    executable = next(filter(None, map(shutil.which, _NAMES)), None)
    if executable is None:
        pytest.fail(f"no browser found (looked for {', '.join(_NAMES)}); install one, such as with: apt-get install chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=executable, args=_ARGUMENTS)
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """An empty page. The test fails if what is shown on it reports an error, opens a dialog, or loads anything from the network."""
    context = browser.new_context(offline=True)
    opened = context.new_page()
    troubles = watched(opened)
    yield opened
    context.close()
    assert not troubles, troubles


def watched(page: Page) -> list[str]:
    """A list that fills with what a page should never do."""
    troubles: list[str] = []

    def refuse(dialog: Dialog) -> None:
        troubles.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    page.on("console", lambda message: troubles.append(f"console: {message.text}") if message.type == "error" else None)
    page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
    page.on("request", lambda request: None if request.url.startswith(_LOCAL) else troubles.append(f"request: {request.url}"))
    page.on("dialog", refuse)
    return troubles
