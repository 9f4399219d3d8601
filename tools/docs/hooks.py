"""What MkDocs cannot find in docs/: pages made from files that stand elsewhere, and links as the site needs them.

Rules kept here:
- A file has one place. README, CONTRIBUTING, CHANGELOG and the examples stay where people look for them; the site has
  a page of each. Links are written as they work in a checkout, and are turned here into the site's.
- A page that stands in no section of mkdocs.yml is a warning, and warnings fail the build.
- Nothing is fetched.
"""

from pathlib import Path

from links import Places  # MkDocs puts this folder on the path while it loads its hooks
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from reference import reference_pages

ROOT = Path(__file__).parents[2]
PLACES = Places(ROOT)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is made: pages of files outside docs/, the list of decisions, and the reference."""
    made = {page: _elsewhere(source) for page, source in PLACES.elsewhere.items()}
    made["decisions/index.md"] = _decisions()
    made |= reference_pages()
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return PLACES.turn_links(markdown, page.file.src_uri)


def _elsewhere(source: Path) -> str:
    text = source.read_text()
    if source.parent == ROOT:
        return text
    code = sorted(source.parent.rglob("*.py"))
    listed = "".join(_listing(file, source.parent) for file in code if file.read_text().count("\n") > 1)
    return f"{text}\n## Files\n{listed}" if listed else text


def _listing(file: Path, folder: Path) -> str:
    body = "".join(f"    {line}\n" if line else "\n" for line in file.read_text().splitlines())
    return f'\n??? note "{file.relative_to(folder)}"\n\n    ```python\n{body}    ```\n'


def _decisions() -> str:
    rows = []
    for file in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        title = file.read_text().partition("\n")[0].lstrip("# ")
        rows.append(f"- [{title}]({file.name})\n")
    return f"# Decisions\n\nWhat was decided, why, and what follows from it, oldest first.\n\n{''.join(rows)}"
