"""Links between files of the checkout, as links between pages of the site."""

import posixpath
import re
from pathlib import Path

_CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_OUTSIDE = ("http://", "https://", "mailto:", "#")


class Places:
    """Which page of the site a file is, and which file a page was made of."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.elsewhere = {
            "index.md": root / "README.md",
            "contributing.md": root / "CONTRIBUTING.md",
            "changes.md": root / "CHANGELOG.md",
        }
        for readme in sorted(root.glob("examples/*/README.md")):
            self.elsewhere[f"examples/{readme.parent.name}.md"] = readme

    def turn_links(self, markdown: str, page: str) -> str:
        """The text of a page, with its links as the site needs them; code stays as it is."""
        source = self.elsewhere.get(page, self._root / "docs" / page)
        folder = source.parent.relative_to(self._root).as_posix()

        def turn(match: re.Match[str]) -> str:
            text, target = match.groups()
            if target.startswith(_OUTSIDE):
                return match[0]
            path, hash_, anchor = target.partition("#")
            file = posixpath.normpath(posixpath.join(folder, path))
            found = self._page_of(file)
            if found is not None:
                return f"[{text}]({posixpath.relpath(found, posixpath.dirname(page) or '.')}{hash_}{anchor})"
            # A file of the checkout without a page is named; anything else is left for MkDocs to complain of.
            return text if (self._root / file).exists() else match[0]

        kept: list[str] = []

        def keep(match: re.Match[str]) -> str:
            kept.append(match[0])
            return f"\0{len(kept) - 1}\0"

        turned = _LINK.sub(turn, _CODE.sub(keep, markdown))
        return re.sub(r"\0(\d+)\0", lambda match: kept[int(match[1])], turned)

    def _page_of(self, file: str) -> str | None:
        for page, source in self.elsewhere.items():
            folder = source.parent.relative_to(self._root).as_posix()
            if file == source.relative_to(self._root).as_posix():
                return page
            if page.startswith("examples/") and (file == folder or file.startswith(f"{folder}/")):
                return page
        if file == "docs/decisions":
            return "decisions/index.md"
        if file.startswith("docs/") and file.endswith(".md"):
            return file.removeprefix("docs/")
        return None
