"""The documentation is tested: its code blocks, doctests, paths and links."""

from __future__ import annotations

import doctest
import importlib
import re
import runpy
import shlex
from collections import Counter
from pathlib import Path

import pytest
import typer

import sparsemla
import sparsemla_lab
from sparsemla.kernels.common.table import TIERS
from sparsemla_lab.bench import report
from sparsemla_lab.cli import app

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [Path(package.__file__).resolve().parent for package in (sparsemla, sparsemla_lab)]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
REPOSITORY = "https://github.com/sparsemla/sparsemla/blob/main/"
RAW = "https://raw.githubusercontent.com/sparsemla/sparsemla/main/"
TABLES = runpy.run_path(str(ROOT / "docs" / "tables.py"))
LLMS = runpy.run_path(str(ROOT / "docs" / "llms.py"))

BLOCK = re.compile(r"^```(?P<tag>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
GENERATED = re.compile(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", re.DOTALL)
OBJECT = re.compile(r"^::: (\S+)$", re.MULTILINE)
PATH_SUFFIXES = {".cfg", ".csv", ".json", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"}
TOP_FOLDERS = ("src/", "lab/", "tests/", "docs/", ".ci/")


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
    """Words in backticks, outside of code blocks, that look like a path of the repository."""
    words = CODE_SPAN.findall(BLOCK.sub("", text))
    return {
        word
        for word in words
        if re.fullmatch(r"[\w./-]+", word)
        and (Path(word).suffix in PATH_SUFFIXES or word.startswith(TOP_FOLDERS))
    }


def replacements(text: str) -> list[tuple[str, str, str]]:
    """The hunks of the ``diff`` blocks of a page: the path, and the lines before and after."""
    found = []
    for block in BLOCK.finditer(text):
        if block["tag"].strip() == "diff":
            for part in re.split(r"^--- .*\n", block["body"], flags=re.MULTILINE)[1:]:
                path, *hunks = re.split(r"^@@\n", part, flags=re.MULTILINE)
                for hunk in hunks:
                    lines = hunk.splitlines(keepends=True)
                    before, after = (
                        "".join(line[1:] for line in lines if line[0] in kinds)
                        for kinds in (" -", " +")
                    )
                    found.append((path.removeprefix("+++ b/").strip(), before, after))
    return found


def link_target(page: Path, link: str) -> tuple[Path, str] | None:
    """The file and the anchor that a link names, or None if it leads out of the repository."""
    path, _, anchor = link.partition("#")
    for prefix in (REPOSITORY, RAW):
        if path.startswith(prefix):
            return ROOT / path.removeprefix(prefix), anchor
    if "://" in path:
        return None
    return (page.parent / path if path else page), anchor


def anchors(page: Path) -> set[str]:
    """The anchors of a page on the site: its headings, and the objects documented there."""
    text = TABLES["with_tables"](BLOCK.sub("", page.read_text(encoding="utf-8")))
    words = (re.sub(r"[^\w -]", "", heading) for heading in HEADING.findall(text))
    return {each.strip().lower().replace(" ", "-") for each in words} | {*OBJECT.findall(text)}


PAGES_WITH_CODE = [page for page in PAGES if python_blocks(page.read_text(encoding="utf-8"))]
MODULES_WITH_EXAMPLES = [
    ".".join(path.relative_to(package.parent).with_suffix("").parts)
    for package in PACKAGES
    for path in sorted(package.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=page_id)
def test_code_blocks_run_in_order(page: Path) -> None:
    namespace = {"__name__": page.stem}
    for line, body in python_blocks(page.read_text(encoding="utf-8")):
        # Blank lines in front make a traceback point at the line of the page.
        code = compile("\n" * (line - 1) + body, str(page), "exec")
        exec(code, namespace)


PAGES_WITH_DIFFS = [page for page in PAGES if replacements(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES_WITH_DIFFS, ids=page_id)
def test_diffs_fit_the_code(page: Path) -> None:
    files: dict[str, str] = {}
    for path, before, after in replacements(page.read_text(encoding="utf-8")):
        if before:
            text = files.get(path) or (ROOT / path).read_text(encoding="utf-8")
            assert before in text, f"{page_id(page)}: {path} has no lines\n{before}"
            files[path] = text.replace(before, after, 1)
        else:
            assert not (ROOT / path).exists(), f"{page_id(page)}: {path} exists"
            files[path] = after
    for path, text in files.items():
        compile(text, path, "exec")


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
    dead = []
    for link in set(LINK.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))):
        target = link_target(page, link)
        if target is None:
            continue
        path, anchor = target
        if not path.exists() or (anchor and anchor not in anchors(path)):
            dead.append(link)
    assert not dead, f"{page_id(page)} has dead links: {sorted(dead)}"


def test_readme_links_are_absolute() -> None:
    links = LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_links_of_the_docs_stay_in_the_site() -> None:
    docs = ROOT / "docs"
    outside = [
        f"{page_id(page)}: {link}"
        for page in docs.rglob("*.md")
        for link in LINK.findall(page.read_text(encoding="utf-8"))
        if "://" not in link and docs not in [*(page.parent / link).resolve().parents]
    ]
    assert outside == []


def test_the_site_documents_every_public_name() -> None:
    pages = (ROOT / "docs" / "api").glob("*.md")
    documented = {name for page in pages for name in anchors(page)}
    assert {f"sparsemla.{name}" for name in sparsemla.__all__} <= documented


def test_the_twelve_names_exist() -> None:
    text = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    names = re.findall(r"^\| \[`(\w+)`\]", text, re.MULTILINE)
    *ops, last = names
    assert len(names) == 12
    assert set(ops) <= set(sparsemla.__all__)
    assert last == "enable"


REFERENCES = (
    "-details",
    "-evidence",
    "-goals",
    "-ops",
    "-settings",
    "contracts",
    "documents",
    "formats",
)
"""Ends of pages that are looked up rather than read."""


def guides() -> list[Path]:
    """The pages that a user reads from the beginning to the end."""
    docs = ROOT / "docs"
    pages = [*docs.glob("*.md"), *(docs / "quickstart").glob("*.md")]
    return sorted(page for page in pages if not page.stem.endswith(REFERENCES))


def num_words(page: Path) -> int:
    """Words of a page, but for tables that a program writes or the site fills in."""
    text = GENERATED.sub("", page.read_text(encoding="utf-8")).replace("|", " ")
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


@pytest.mark.parametrize("page", guides(), ids=page_id)
def test_guides_are_short(page: Path) -> None:
    assert num_words(page) <= 1500


NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?")


def sentences(text: str) -> list[str]:
    """Sentences of a page: not its code, tables, headings and links."""
    text = re.sub(r"<style>.*?</style>", "", BLOCK.sub("", GENERATED.sub("", text)), flags=re.S)
    text = LINK.sub("]", CODE_SPAN.sub("", text))
    prose = "\n".join("" if re.match(r" *\||#", line) else line for line in text.splitlines())
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose)
    return [each for part in paragraphs for each in re.split(r"(?<=[.:;?!])\s", part)]


@pytest.mark.parametrize("page", [ROOT / "README.md", *guides()], ids=page_id)
def test_rows_of_numbers_are_tables(page: Path) -> None:
    found = sentences(page.read_text(encoding="utf-8"))
    assert [each for each in found if len(NUMBER.findall(each)) > 5] == []


def test_sentences_end_at_stops_tables_and_items() -> None:
    text = "# A 1\nOne 2.5, `3`: two\nlines [4](5.md).\n\n| 6 |\n- Item 7\n- item 8\n"
    assert [NUMBER.findall(each) for each in sentences(text)] == [["2.5"], ["4"], ["7"], ["8"]]


COMMIT = re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7}\b")
READ_FIRST = ("Start", "Quickstarts", "Guides", "Coming from")
"""Sections of the site whose pages are read by those who do not know the repository."""


def test_pages_that_are_read_first_name_no_commits() -> None:
    yaml = pytest.importorskip("yaml")
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = {"README.md", "docs/index.md", "docs/adding-a-kernel.md"}
    for entry in site["nav"]:
        ((title, target),) = entry.items()
        if title in READ_FIRST:
            pages |= {f"docs/{name}" for page in target for name in page.values()}
    assert len(pages) > 18
    for page in sorted(pages):
        text = LINK.sub("", BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8")))
        assert COMMIT.findall(text) == [], page


def test_installs_are_from_a_checkout() -> None:
    """Until a release, the name on PyPI is nobody's or a stranger's."""
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        found = re.findall(r"pip install [\"']?sparsemla\b", page.read_text(encoding="utf-8"))
        assert found == [], page_id(page)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_pages_install_the_pinned_torch(page: str) -> None:
    files = ROOT.glob("constraints*.txt")
    pins = {pin for file in files for pin in file.read_text(encoding="utf-8").split()}
    (pin,) = re.findall(r"torch==[\d.]+", (ROOT / page).read_text(encoding="utf-8"))
    assert pin in pins


def test_the_readme_lists_the_tiers() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Tiers\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == list(TIERS)
    numbers = {4: "four", 5: "five", 6: "six"}
    assert f"up to {numbers[len(TIERS)]} tiers" in section


@pytest.mark.parametrize(("name", "file"), [("results", "h200"), ("results-h100", "h100")])
def test_the_site_shows_every_row(name: str, file: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    found = report.load(ROOT / "benchmarks" / f"{file}.json")
    shown = TABLES["on_page_markdown"](page)
    times = [f"| {' | '.join(report.cells(row)[1:5])} |" for row in found.rows]
    assert report.ceiling_line(found) in shown
    assert Counter(re.findall(r"^\|(?: [^|]+ \|){4}(?= [^|]+ \| +[\d|])", shown, re.M)) == Counter(
        times
    )


def test_the_figure_shows_the_measurements() -> None:
    figures = runpy.run_path(str(ROOT / "benchmarks" / "figures.py"))
    drawn = figures["figure"](figures["report"].load(figures["DATA"]))
    assert figures["FIGURE"].read_text(encoding="utf-8") == drawn


def test_the_rows_of_the_engine_are_shown() -> None:
    import engine

    if not engine.DATA.exists():
        pytest.skip("not measured yet")
    measured = engine.load()
    assert engine.FIGURE.read_text(encoding="utf-8") == engine.figure(measured)
    document = engine.DOCUMENT.read_text(encoding="utf-8")
    assert engine.with_table(document, measured) == document


def test_the_rows_beside_sglang_are_shown() -> None:
    import hooks

    if not hooks.DATA.exists():
        pytest.skip("not measured yet")
    document = hooks.DOCUMENT.read_text(encoding="utf-8")
    assert hooks.with_table(document, hooks.load()) == document


def command_lines(text: str) -> list[list[str]]:
    """The arguments of each ``sparsemla`` command in the code of a page: its blocks and tables."""
    blocks = (block["body"] for block in BLOCK.finditer(text) if block["tag"].strip() == "bash")
    shown = "\n".join(blocks).replace("\\\n", " ").splitlines()
    shown += [span for span in CODE_SPAN.findall(BLOCK.sub("", text)) if "sparsemla " in span]
    return [
        shlex.split(line[line.index("sparsemla ") :], comments=True)[1:]
        for line in shown
        if re.match(r"(\w+=\S+ )*sparsemla [a-z]", line)
    ]


PAGES_WITH_COMMANDS = [
    page
    for page in PAGES
    if page.name != "CHANGELOG.md" and command_lines(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=page_id)
def test_commands_are_of_the_parser(page: Path) -> None:
    commands = typer.main.get_command(app).commands
    for name, *arguments in command_lines(page.read_text(encoding="utf-8")):
        assert name in commands, f"{page_id(page)}: sparsemla {name}"
        known = {option for each in commands[name].params for option in each.opts}
        options = {each.partition("=")[0] for each in arguments if each.startswith("--")}
        assert options <= known, f"{page_id(page)}: sparsemla {name} {' '.join(arguments)}"


def test_the_site_documents_every_command() -> None:
    shown = TABLES["with_tables"]((ROOT / "docs" / "command-line.md").read_text(encoding="utf-8"))
    sections = dict(re.findall(r"^## sparsemla (\S+)\n(.*?)(?=^## |\Z)", shown, re.M | re.S))
    commands = typer.main.get_command(app).commands
    assert sections.keys() == commands.keys()
    for name, command in commands.items():
        for parameter in command.params:
            assert f"| `{parameter.opts[0]}`" in sections[name]


def test_llms_txt_lists_every_page() -> None:
    yaml = pytest.importorskip("yaml")
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    text = LLMS["llms"](site["site_name"], site["site_description"], site["nav"])
    listed = re.findall(r"^- \[.+\]\(" + re.escape(f"{RAW}docs/") + r"(\S+)\)", text, re.M)
    docs = ROOT / "docs"
    assert sorted(listed) == sorted(str(each.relative_to(docs)) for each in docs.rglob("*.md"))
    assert "formats.md): A `CacheFormat` describes the bytes of one token.\n" in text


def test_parsers_find_blocks_paths_and_links() -> None:
    text = (
        "See `docs/none.md` and `a/b` `x`.\n\n```python\ny = 1\n```\n\n```bash\nls `no.md`\n```\n"
    )
    assert named_paths(text) == {"docs/none.md"}
    assert python_blocks(text) == [(4, "y = 1\n")]
    page = ROOT / "docs" / "formats.md"
    assert link_target(page, "#names") == (page, "names")
    assert link_target(page, f"{REPOSITORY}README.md#install") == (ROOT / "README.md", "install")
    assert link_target(page, "https://example.org/x.md") is None
    assert {"names", "fp8_ds_mla-656-bytes"} <= anchors(page)
