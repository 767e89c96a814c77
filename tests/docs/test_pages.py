"""The blocks of code of README and of the guides do what the page says, in their order."""

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pages
import pytest
import s3
import zarr
from conftest import make

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
GUIDES = list(dict.fromkeys(re.findall(r"docs/guides/[\w-]+\.md", README)))
"""In the order in which README lists them."""
PAGES = ["README.md", "docs/getting-started.md", *GUIDES, "docs/statistics.md", "docs/kernels.md"]
BRINGS_DATA = ("README.md", "docs/statistics.md", "docs/kernels.md")
"""Pages whose blocks begin with arrays that the reader has."""


def small(folder):
    """The arrays that pages have, of a size for tests."""
    rng = np.random.default_rng(0)
    make(folder / "a.zarr", rng.standard_normal((200, 300), "f4"))
    make(folder / "b.zarr", rng.standard_normal((300, 100), "f4"))
    genotypes = rng.integers(-1, 3, (500, 40), "i1")
    make(folder / "genotypes.zarr", genotypes)
    make(folder / "base.zarr", rng.standard_normal((300, 32), "f4"))
    make(folder / "queries.zarr", rng.standard_normal((50, 32), "f4"))
    make(folder / "x.zarr", rng.standard_normal((200, 30), "f4"))
    make(folder / "y.zarr", rng.standard_normal((200, 3), "f4"))
    make(folder / "weights.zarr", rng.random(200, "f4"))
    zarr.create_group(folder / "climate.zarr")
    make(folder / "climate.zarr" / "temperature", rng.standard_normal((200, 60), "f4"))
    calls = np.stack([genotypes > 0, genotypes > 1], axis=-1).astype("i1")
    zarr.create_group(folder / "calls.vcz")
    make(folder / "calls.vcz" / "call_genotype", calls, dimension_names=("variants", "samples", "ploidy"))
    names = np.array([f"NA{i:05}" for i in range(1, 41)], np.dtypes.StringDType())
    make(folder / "calls.vcz" / "sample_id", names, dimension_names=("samples",))


def blocks(name):
    found = pages.blocks((ROOT / name).read_text("utf-8"))
    assert found
    return found


@pytest.mark.filterwarnings("ignore")  # those of libraries that only the page uses
def test_the_readme_does_what_it_says(tmp_path):
    small(tmp_path)
    runner = pages.Runner(tmp_path, {})
    for block in blocks("README.md"):
        runner.run(block)


def test_the_readme_lists_every_guide():
    assert set(GUIDES) == {f"docs/guides/{page.name}" for page in (ROOT / "docs" / "guides").glob("*.md")}


@pytest.mark.slow
@pytest.mark.timeout(3600)  # of a machine with other work; alone two cores need some minutes
def test_a_newcomer_gets_what_every_page_says(tmp_path, request):
    """A clone of the working tree, README's commands from installation on, then those of each page, each page
    in a folder of its own, in so much processor time that two cores need a quarter of an hour at most."""
    before = processor_seconds()
    checkout = clone(tmp_path / "checkout")
    environment = {name: value for name, value in os.environ.items() if not OURS.match(name)}
    environment |= {"COLUMNS": "80", "OOC_GEMM_CACHE": str(tmp_path / "cache")}
    environment["PYTEST_ADDOPTS"] = "tests/docs"  # of `make test`, which the CI runs whole
    installs = index_answers(tmp_path / "downloads")
    if installs:
        subprocess.run([sys.executable, "-m", "venv", checkout / ".venv"], check=True)
        environment["PATH"] = f"{checkout / '.venv' / 'bin'}{os.pathsep}{environment['PATH']}"
    else:
        environment |= {"PATH": pages.this_python(tmp_path / "bin"), "PYTHONPATH": str(checkout)}
    for name in PAGES:
        served = name == "docs/guides/s3.md" and not s3.missing()
        more = s3.environment(request.getfixturevalue("server")) if served else {}
        follow(name, tmp_path / Path(name).stem, environment | more, served, checkout if installs else None)
    assert processor_seconds() - before < 900
    if not installs:
        pytest.skip("no package index answers: all pages were followed, with what is installed here")


OURS = re.compile(r"(PYTHON|PYTEST|COV|OOC_GEMM|MAKE|MFLAGS|VENV|ARGS|WORKERS)")
"""Environment variables of this run, which a newcomer has not."""


def clone(to):
    """A copy of all files that git would commit; without git, of all that are not made by a build."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        shutil.copytree(ROOT, to, ignore=shutil.ignore_patterns(".venv*", "build", "dist", ".*_cache"))
        return to
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    return to


def processor_seconds():
    """That commands have taken which have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def index_answers(folder):
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "hatchling"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def follow(name, folder, environment, with_s3, checkout):
    """Run all blocks of a page. Those for a checkout come first: README shows its use before it installs."""
    folder.mkdir()
    if name in BRINGS_DATA:
        small(folder)
    newcomer = pages.Newcomer(folder, environment, with_s3, checkout)
    try:
        for block in sorted(blocks(name), key=lambda block: "in a checkout" not in block.title):
            newcomer.run(block)
    except AssertionError as error:
        pytest.fail(f"{name}, {error}", pytrace=False)
    finally:
        newcomer.close()


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\nb\n", "a\n", False),
        ("a\nb\n", "b\n", False),
        ("a 1.5 s\n", "a … s\n", True),
        ("a\nb\nc\n", "…\nc\n", True),
        ("a\nb\nc\n", "a\n…\n", True),
        ("a\n1\nc\n", "a…c\n", False),
        ("a.b\n", "axb\n", False),
    ],
)
def test_outputs_are_compared(printed, expected, same):
    assert (not pages.differs(printed, expected)) == same


def test_blocks_of_other_languages_are_refused():
    with pytest.raises(AssertionError, match="neither"):
        pages.blocks("```bash\ntrue\n```\n")
    (block,) = pages.blocks('```sh title="needs a GPU"\ntrue\n```\n\n```text\nyes\n```\n')
    assert (block.title, block.code, block.printed) == ("needs a GPU", "true\n", "yes\n")


def test_a_block_that_fails_is_found(tmp_path):
    runner = pages.Runner(tmp_path, {})
    with pytest.raises(AssertionError, match="line 3"):
        runner.run(pages.Block(3, "sh", "", "false\ntrue\n", None))
    with pytest.raises(AssertionError):
        runner.run(pages.Block(3, "sh", "needs a GPU", "if\n", None))
    with pytest.raises(SyntaxError):
        runner.run(pages.Block(3, "python", "needs a GPU", "if\n", None))
