"""The site builds without a warning, from what is here alone, and has every public name and every command."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import faregate as fg
from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(  # not with --quiet: then MkDocs does not count its warnings, and nothing is strict
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_reference_has_every_public_name(site: Path) -> None:
    text = "".join((site / "reference" / f"{page}.html").read_text() for page in ("faregate", "errors"))
    named = {name for name in fg.__all__ if f'id="faregate.{name}"' in text}
    modules = {name for name in fg.__all__ if (site / "reference" / f"{name}.html").exists()}
    assert named | modules == set(fg.__all__)
    assert "Record an event in the open transaction" in text, "docstrings of methods"
    for module in ("observe", "probes", "spark", "testing"):
        page = (site / "reference" / f"{module}.html").read_text()
        public = getattr(fg, module).__all__
        assert [name for name in public if not re.search(rf'<h2 id="faregate\.[\w.]*\b{name}"', page)] == []


def test_the_command_line_is_a_page(site: Path) -> None:
    page = (site / "reference" / "command-line.html").read_text()
    assert "faregate dead replay" in page and "How many per second at most" in page


def test_files_outside_of_docs_are_pages_and_linked_to(site: Path) -> None:
    assert 'href="examples/web.html"' in (site / "index.html").read_text()
    assert 'href="../examples/web.html"' in (site / "how-to" / "fastapi.html").read_text()
    assert "place_order" in (site / "examples" / "web.html").read_text()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    page = (site / "index.html").read_text()
    for start in ('<script src="http', '<link rel="stylesheet" href="http', "fonts.g"):
        assert start not in page
