"""Documents agree with the code: the table of imports, links, named files, and the list of results."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_structure import USES

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PLACES = (
    "support|planning|storage|engine|cuda_kernels|devices|run|dask|bench|cli",
    "tests|benchmarks|examples|docs|kernels",
)


def test_the_table_of_imports_is_the_one_that_is_tested():
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \|$", ARCHITECTURE.read_text("utf-8"), re.MULTILINE)
    assert {package: set(uses.split(", ")) - {"–"} for package, uses in rows} == USES


def test_the_architecture_is_short():
    assert len(ARCHITECTURE.read_text("utf-8").splitlines()) <= 150


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8")):
        if "://" not in link:
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_are_there(page):
    ours, others = PLACES
    for name in re.findall(r"`([\w/.]+/[\w.]*)`", page.read_text("utf-8")):
        top = name.split("/")[0]
        if re.fullmatch(ours, top) and not (ROOT / name).exists():
            assert (ROOT / "ooc_gemm" / name).exists(), name
        elif re.fullmatch(others, top):
            assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_of_the_code_are_there(page, code):
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for name in re.findall(r"`([A-Z][a-z]\w*\.[a-z]\w*|[A-Z][A-Z0-9]*_[A-Z0-9_]+)`", text):
        for part in name.split("."):
            assert re.search(rf"\b{part}\b", code), name


@pytest.fixture(scope="module")
def code():
    files = (
        file for folder in ("ooc_gemm", "kernels", "benchmarks") for file in (ROOT / folder).rglob("*.*")
    )
    return "\n".join(file.read_text("utf-8") for file in files if file.suffix in (".py", ".cu", ".cuh"))


@pytest.mark.parametrize("program", ["tables", "figures"])
def test_tables_and_figures_are_those_of_the_results(program):
    command = [sys.executable, ROOT / "benchmarks" / f"{program}.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_result_says_how_it_was_measured():
    listed = set(
        re.findall(
            r"^\| `([\w.-]+\.json)` \|",
            (ROOT / "docs" / "measurements" / "README.md").read_text("utf-8"),
            re.MULTILINE,
        )
    )
    assert listed == {path.name for path in (ROOT / "benchmarks" / "results").glob("*.json")}


def test_every_decision_is_listed():
    folder = ROOT / "docs" / "decisions"
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (folder / "README.md").read_text("utf-8")))
    assert listed == {path.name for path in folder.glob("*.md")} - {"README.md"}
