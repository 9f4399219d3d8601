"""The figures of docs/capacity.md are what the program prints from the costs that come with it."""

from tests.docs.pages import blocks
from tools.docs.printed import PAGE, rewritten


def test_the_figures_of_the_page_are_what_the_program_prints() -> None:
    text = PAGE.read_text()
    assert len([block for block in blocks(PAGE, "console") if block.text.startswith("$ faregate capacity")]) >= 5
    assert rewritten(text) == text, "./dev docs --printed writes them again"


def test_a_figure_that_was_written_by_hand_is_found() -> None:
    page = "```console\n$ faregate capacity --rate 1000 --engine journal --store sqlite\nabout 1\n```\n"
    assert "journal, and the process" in rewritten(page)
    assert "about 1" not in rewritten(page)
