"""What the documentation says is run: code blocks, doctests and the paths it names."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

import sparsemla

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(sparsemla.__file__).resolve().parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

BLOCK = re.compile(r"^```(?P<tag>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH_SUFFIXES = {".cfg", ".csv", ".json", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"}
TOP_FOLDERS = ("src/", "tests/", "docs/", ".ci/")


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def python_blocks(text: str) -> list[tuple[int, str]]:
    """The ``python`` blocks of a page, each with the line number of its first line."""
    return [
        (text.count("\n", 0, match.start("body")) + 1, match["body"])
        for match in BLOCK.finditer(text)
        if match["tag"].strip() == "python"
    ]


def named_paths(text: str) -> set[str]:
    """Words in backticks, outside of code blocks, that read as a path of the repository."""
    words = CODE_SPAN.findall(BLOCK.sub("", text))
    return {
        word
        for word in words
        if re.fullmatch(r"[\w./-]+", word)
        and (Path(word).suffix in PATH_SUFFIXES or word.startswith(TOP_FOLDERS))
    }


PAGES_WITH_CODE = [page for page in PAGES if python_blocks(page.read_text(encoding="utf-8"))]
MODULES_WITH_EXAMPLES = [
    ".".join(("sparsemla", *path.relative_to(PACKAGE).with_suffix("").parts))
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=page_id)
def test_code_blocks_run_in_order(page: Path) -> None:
    namespace = {"__name__": page.stem}
    for line, body in python_blocks(page.read_text(encoding="utf-8")):
        # Blank lines in front make a traceback point at the line of the page.
        code = compile("\n" * (line - 1) + body, str(page), "exec")
        exec(code, namespace)


@pytest.mark.parametrize("module", MODULES_WITH_EXAMPLES)
def test_docstring_examples(module: str) -> None:
    result = doctest.testmod(
        importlib.import_module(module.removesuffix(".__init__")),
        optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS,
    )
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_named_paths_exist(page: Path) -> None:
    named = named_paths(page.read_text(encoding="utf-8"))
    missing = sorted(path for path in named if not (ROOT / path).exists())
    assert not missing, f"{page_id(page)} names paths that do not exist: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    targets = {link.split("#")[0] for link in LINK.findall(page.read_text(encoding="utf-8"))}
    local = {target for target in targets if target and "://" not in target}
    missing = sorted(target for target in local if not (page.parent / target).exists())
    assert not missing, f"{page_id(page)} links to files that do not exist: {missing}"


def test_the_parsers_find_what_they_look_for() -> None:
    text = (
        "See `docs/none.md` and `a/b` `x`.\n\n```python\ny = 1\n```\n\n```bash\nls `no.md`\n```\n"
    )
    assert named_paths(text) == {"docs/none.md"}
    assert python_blocks(text) == [(4, "y = 1\n")]
