"""Reports of real runs: what stands in them, and how they look in a real browser."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import browser
import numpy as np
import pytest
from conftest import make, ooc

import ooc_gemm
from ooc_gemm.bench import tables
from ooc_gemm.cli.group import cli
from ooc_gemm.cli.reports import benchmark
from ooc_gemm.reporting import report as reporting
from ooc_gemm.support.recording import Recording

WIDTHS = 400, 1600
HOSTILE = "<img src=x onerror='window.alarmed=1'>$$x$${{7*7}}\u202e"
"""A name that would do harm where it is not escaped: HTML, TeX, a template, and a change of direction."""
SMALL = "-M", "1GiB", "-d", "cpu"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def text_of(page):
    """The text of a page without scripts and tags."""
    found = re.sub(r"<(script|style)\b.*?</\1>", " ", page.read_text("utf-8"), flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", found)))


def sections(page):
    return re.findall(r'<section id="(\w+)"', page.read_text("utf-8"))


def test_a_report_says_what_was_done_and_hides_what_is_secret(here, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    x = np.random.default_rng(0).standard_normal((70, 50)).astype("f4")
    make(HOSTILE, x, chunks=(20, 20))
    monkeypatch.setattr(sys, "argv", ["ooc-gemm", "gram", "s3://user:secret-key@host/x", "wJalrXUtnFEMI"])
    done = ooc("gram", HOSTILE, "c", "--verify", "--report", "r.html", *SMALL)
    assert (done.code, done.err) == (0, "")
    page, said = here / "r.html", text_of(here / "r.html")
    assert sections(page) == ["checks", "timeline", "memory", "stages", "plan", "result", "environment"]
    raw = page.read_text("utf-8")
    assert "<img" not in raw
    assert f"gram {HOSTILE} c done" in said
    assert "it was checked, and is right to rounding" in said
    assert "product 70×50 · 50×70, symmetric" in said
    assert "ooc-gemm gram s3://***@host/x ***" in said
    assert not re.search("secret-key|wJalrXUtnFEMI", raw)
    assert len(raw) < 2 << 20
    assert not list(here.glob("*.part"))


def test_a_run_that_fails_is_reported_and_fails_as_before(here):
    a = make("a", np.ones((64, 64), "f4"), chunks=(16, 16), compressors=None)
    make("b", np.ones((64, 64), "f4"), chunks=(16, 16))
    chunk = here / a / "c" / "3" / "3"
    chunk.write_bytes(chunk.read_bytes()[:-8])
    without = ooc("multiply", "a", "b", "c", *SMALL, "-f")
    done = ooc("multiply", "a", "b", "c", *SMALL, "-f", "--report", "r.html")
    assert (done.code, done.err) == (without.code, without.err)
    assert done.code == 1
    said = text_of(here / "r.html")
    assert "multiply a b c failed" in said
    assert done.err.removeprefix("Error: ").strip() in said
    assert {"timeline", "plan"} <= set(sections(here / "r.html"))


def test_nothing_is_computed_where_no_report_can_be_written(here, monkeypatch):
    make("a", np.ones((4, 4), "f4"), chunks=(4, 4))
    for name, said in (
        ("r.txt", "ends in .html"),
        ("no/r.html", "cannot be written there"),
    ):
        done = ooc("gram", "a", "c", "--report", name)
        assert done.code == 2
        assert said in done.err
    find = reporting.find_spec
    with monkeypatch.context() as patched:
        patched.setattr(reporting, "find_spec", lambda name: None if name == "bokeh" else find(name))
        done = ooc("gram", "a", "c", "--report", "r.html")
    assert done.code == 2
    assert "a report needs bokeh; install it with pip install 'ooc-gemm[report]'" in done.err
    done = ooc("cov", "a", "c", "--plan", "--report", "r.html")
    assert done.code == 2
    assert "leave out --report" in done.err
    done = ooc("gram", "missing", "c", "--report", "r.html")
    assert done.code == 2
    assert sorted(path.name for path in here.iterdir()) == ["a"]


def test_a_report_that_cannot_be_written_in_the_end_is_a_warning(here, monkeypatch):
    def fail(*args, **options):
        raise OSError("no process could be started")

    monkeypatch.setattr(reporting.subprocess, "run", fail)
    with pytest.warns(UserWarning, match="cannot be written: OSError: no process") as seen:  # noqa: SIM117
        with ooc_gemm.report("r.html"):
            found = ooc_gemm.multiply(np.ones((3, 3)), np.ones((3, 3)), memory_limit="1GiB").array
    assert (found == 3).all()
    assert [one.filename for one in seen] == [__file__]


def test_every_command_that_computes_has_a_report():
    computing = {
        "multiply",
        "gram",
        "cov",
        "corrcoef",
        "grm",
        "king",
        "topk",
        "threshold",
        "pca",
        "svd",
        "lstsq",
    }
    having = {
        name for name, one in cli.commands.items() if any("--report" in param.opts for param in one.params)
    }
    assert having == computing
    for one in cli.commands["bench"].commands.values():
        assert any("--report" in param.opts for param in one.params), one.name


COMMANDS = {
    "multiply": (HOSTILE, HOSTILE, "OUT", "--transpose-b", "--verify"),
    "cov": (HOSTILE, "OUT"),
    "grm": ("g", "OUT"),
    "king": ("g", "OUT"),
    "topk": (HOSTILE, "OUT", "-k", "3"),
    "threshold": (HOSTILE, "OUT", "--least", "0.1"),
    "pca": (HOSTILE, "OUT", "-k", "3"),
    "lstsq": (HOSTILE, "y", "OUT"),
}
"""Commands, and what they are given."""


def run(name):
    """Run a command with a report, of arrays that are made first; the page."""
    rng = np.random.default_rng(0)
    for array, values in {
        HOSTILE: rng.standard_normal((300, 200)).astype("f4"),
        "y": rng.standard_normal((300, 2)).astype("f4"),
        "g": rng.integers(-1, 3, (200, 60)).astype("i1"),
    }.items():
        if not os.path.exists(array):
            make(array, values, chunks=(64, 64))
    given = [f"{name}.zarr" if word == "OUT" else word for word in COMMANDS[name]]
    done = ooc(name, *given, *(SMALL[:2] if name == "lstsq" else SMALL), "--report", f"{name}.html")
    assert done.code == 0, done.err
    return os.path.abspath(f"{name}.html")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_pages_of_commands(here, name):
    run(name)
    wanted = {"timeline", "memory", "stages", "result", "environment"}
    assert wanted <= set(sections(here / f"{name}.html"))


def see(pages):
    """What a browser sees, by page and width; pictures of it go to the folder PICTURES."""
    return browser.look(pages, WIDTHS, picture=os.environ.get("PICTURES")).items()


@pytest.mark.slow
def test_pages_in_a_browser(here):
    browser.path()
    for (page, width), seen in see([run("multiply"), run("pca")]):
        assert (seen.complaints, seen.alarmed, seen.overflow) == ([], False, 0), (page, width)
        assert set(seen.figures) == {"timeline", "memory", "stages"}, page
        for name, found in seen.figures.items():
            assert any(colours >= 2 for *_, colours in found), (page, width, name, found)
            assert all(wide <= 2 * width for wide, *_ in found)
        before, after = seen.zoomed
        assert before[0] <= after[0] < after[1] <= before[1]
        assert after[1] - after[0] < 0.6 * (before[1] - before[0])


@pytest.mark.slow
def test_pages_of_benchmarks_in_a_browser(here):
    browser.path()
    kernels = Path(__file__).resolve().parents[2] / "benchmarks/results/kernels_h200.json"
    for name, *given in (
        ("kernels", "--from", kernels, "--dtype", "float32"),
        ("engine", ".", "--size", "300", "--repeat", "1"),
        ("stress", ".", "--cases", "1", "--seed", "1"),
    ):
        done = ooc("bench", name, *given, "--report", f"{name}.html")
        assert done.code == 0, done.err
    row = {"group": "read", "way": "engine", "bytes_per_second": [1e9, None, 3e9]}
    with Recording() as recording:
        benchmark({"suite": "io", "threads": [1, 2, 4], "rows": [row]}, ["some", tables.pairs_table([])])
    assert reporting.write(here / "io.html", recording, "io") is None
    for (page, width), seen in see([str(path) for path in sorted(here.glob("*.html"))]):
        assert (seen.complaints, seen.overflow) == ([], 0), (page, width)
        assert any(colours >= 2 for *_, colours in seen.figures["benchmark"]), (page, width)


@pytest.mark.slow
def test_a_process_that_is_interrupted_leaves_a_report(here):
    make("a", np.ones((64, 64), "f4"), chunks=(16, 16))
    program = (
        "import ooc_gemm\n"
        "def stop(*args): raise KeyboardInterrupt\n"
        "with ooc_gemm.report('r.html', title='mine'):\n"
        "    ooc_gemm.multiply('a', 'a', progress=stop, device='cpu', memory_limit='1GiB')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "KeyboardInterrupt" in done.stderr
    assert "mine interrupted" in text_of(here / "r.html")
