"""Every figure of docs/choosing.md is in the table that its link names."""

import re

from test_readme import ROOT

LINK = re.compile(r"\[[^\]]+\]\(benchmarks_details\.md#([\w-]+)\)")
DESCRIPTIONS = re.compile(r"`[^`]*`|int64|H200|ResNet-18|\d+ x \d+|(?:196|3) KB|268 MB|version \d\.\d\.\d")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def sections() -> dict[str, str]:
    """Return the text of each section of the details, by the name of its link."""
    parts = re.split(r"^### (.*)$", (ROOT / "docs" / "benchmarks_details.md").read_text(), flags=re.MULTILINE)
    titles = (re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in parts[1::2])
    return dict(zip(titles, parts[2::2], strict=True))


def test_each_figure_is_in_the_table_that_its_link_names():
    tables = {name: set(NUMBER.findall(text)) for name, text in sections().items()}
    page = (ROOT / "docs" / "choosing.md").read_text()
    count = 0
    for paragraph in re.split(r"\n\n|\n- ", page):
        texts = LINK.split(paragraph)  # text, the name of its link, text, ..., the text behind the last link
        for text, name in zip(texts[::2], [*texts[1::2], None], strict=True):
            for figure in NUMBER.findall(DESCRIPTIONS.sub("", text)):
                figure = figure.rstrip(",")
                assert name is not None, f"{figure} has no table behind it: {text}"
                assert figure in tables[name], f"{figure} is not in {name}: {text}"
                count += 1
    assert count > 50
