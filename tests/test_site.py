"""The documentation site, opened from disk in a browser."""

import os
import subprocess
import sys

import pytest

from tests.documents import ROOT
from tests.support import chromium

pytest.importorskip("mkdocs")
pytest.importorskip("websockets")
if chromium() is None:
    pytest.skip("needs a browser", allow_module_level=True)

from tests.serving.browser import Browser

# Elements of a page that are wider than what shows them: their end can only be seen by scrolling.
CLIPPED = """
[...document.querySelectorAll('.md-typeset pre > code, .md-typeset__scrollwrap, .formula, .md-content')]
  .filter(element => element.scrollWidth > element.clientWidth + 1)
  .map(element => element.className + ': ' + element.textContent.trim().slice(0, 60))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", directory]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "default"}
    (ROOT / "build" / "site-pages").mkdir(parents=True, exist_ok=True)
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return directory


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    browser.size(1280, 900)
    yield browser
    browser.close()


def test_nothing_is_clipped_at_1280_pixels_and_nothing_is_loaded_from_the_network(site, browser):
    clipped = {}
    for page in sorted(site.rglob("*.html")):
        if page.name != "404.html":  # its links are those of a server
            browser.open(page.as_uri())
            browser.until("document.querySelector('h1') !== null")
            clipped[page.relative_to(site).as_posix()] = browser.run(CLIPPED)
    assert not {page: elements for page, elements in clipped.items() if elements}
    assert not [url for url in browser.requested if not url.startswith(("file:", "data:", "about:", "blob:"))]


def test_formulas_are_rendered(site, browser):
    browser.open((site / "docs" / "learn" / "1_duality.html").as_uri())
    assert browser.run("document.querySelectorAll('math').length") > 5
    assert browser.run("document.querySelector('.formula math').getBoundingClientRect().width") > 100
    assert not browser.run("document.querySelector('.md-content').textContent.includes('\\\\\\\\(')")


def test_the_search_finds_a_page_from_disk(site, browser):
    browser.open((site / "index.html").as_uri())
    browser.run("document.querySelector('[data-md-component=search-query]').focus()")
    browser.type("half-life")
    browser.until("document.querySelectorAll('.md-search-result__item').length > 0")
    links = browser.run("[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)")
    assert any("3_selection.html" in link for link in links)
