"""What `pip install ooc-gemm` brings is enough: no extra is needed to import, plan, multiply and verify."""

import json
import os
import subprocess
import sys
import tomllib
from functools import partial
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ooc_gemm
from ooc_gemm.support.memory import MOST, parse_size, spelled_size

ROOT = Path(__file__).resolve().parents[2]
EXTRA = (
    "bokeh",
    "botocore",
    "cubed",
    "cuda",
    "cupy",
    "dask",
    "distributed",
    "fsspec",
    "matplotlib",
    "obstore",
    "zarrs",
)
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]


def closure(names):
    """Distributions that these need, and those in turn, as far as this Python and system need them."""
    found, todo = {}, list(names)
    while todo:
        requirement = Requirement(todo.pop())
        name = canonicalize_name(requirement.name)
        if name in found or not (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        found[name] = distribution(name)
        todo += found[name].requires or []
    return found.values()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Runs code where nothing is installed but ooc-gemm's dependencies and theirs."""
    site = tmp_path_factory.mktemp("site")
    for one in closure(DECLARED):
        for top in {file.parts[0] for file in one.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(one.locate_file(top))

    def run(code, *args, cwd):
        code = f"import sys; sys.path[:0] = [{str(site)!r}, {str(ROOT)!r}]\n{code}"
        command = [sys.executable, "-S", "-W", "error", "-c", code, *map(str, args)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)

    return run


@pytest.mark.slow
def test_commands_run_without_extras(base, tmp_path):
    command_line = "from ooc_gemm.cli import main; main(sys.argv[1:])"
    for command in (
        ("random", "a", "--shape", "300,200", "--compressor", "zstd"),
        ("random", "b", "--shape", "200,100", "--shards", "200,100", "--chunks", "50,50"),
        ("plan", "a", "b", "-M", "512MiB"),
        ("multiply", "a", "b", "c", "-M", "0.5GiB", "--verify"),
        ("gram", "a", "g"),
        ("verify", "a", "b", "c"),
        ("info",),
    ):
        done = base(command_line, *command, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), (command, done.stderr)
    done = base(command_line, "multiply", "a", "b", "d", "--scheduler", "local:1", cwd=tmp_path)
    assert done.returncode == 2
    assert "pip install 'ooc-gemm[distributed]'" in done.stderr
    done = base(command_line, "multiply", "s3://x/a", "b", "d", cwd=tmp_path)
    assert done.returncode == 2
    assert "pip install 'ooc-gemm[remote]'" in done.stderr


def test_no_extra_is_imported_and_each_dependency_is(base, tmp_path):
    code = "import json, ooc_gemm, rich\n"
    code += "import ooc_gemm.api, ooc_gemm.cli.entry, ooc_gemm.bench.engine, ooc_gemm.run.verify\n"
    code += "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = base(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    imported = set(json.loads(done.stdout))
    assert not imported & set(EXTRA)
    assert {text.partition(">=")[0].replace("-", "_") for text in DECLARED} <= imported


SIZES = {
    "512MiB": 512 << 20, "512 mib": 512 << 20, " 8GB ": 8 * 10**9, "8g": 8 * 10**9, "8Gi": 8 << 30,
    "1e9": 10**9, "1.5KiB": 1536, ".5kB": 500, "2.": 2, "7": 7, "7b": 7, "9007199254740993": 9007199254740993,
    "1TB": 10**12, "2PiB": 2 << 50, "1e3k": 10**6, "1E-1GB": 10**8, 123: 123, 1e9: 10**9,
}  # fmt: skip


@pytest.mark.parametrize(("text", "size"), SIZES.items())
def test_sizes(text, size):
    assert parse_size(text) == size


def test_sizes_that_no_machine_has_allow_everything():
    x = np.random.default_rng(0).standard_normal((30, 4))
    for given in (10**400, 10**5000, "9" * 400, "9" * 5000, "9" * 400 + ".5", "1e99PB"):
        assert parse_size(given) == MOST
        for run in (ooc_gemm.gram, ooc_gemm.cov, partial(ooc_gemm.pca, components=2)):
            run(x, memory_limit=given, device="cpu")
    with pytest.raises(ooc_gemm.InputError, match="is not a size"):
        parse_size(-(10**5000))


@pytest.mark.parametrize(
    "text",
    ["", "GB", "0", "-1", "0.2", "8 G B", "8XB", "1e", "nan", "infGB", "1e999", "1,5GB", "0x10", "1..2",
     True],
)  # fmt: skip
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ooc_gemm.InputError, match="is not a size; write for example 512MiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (921, "921 B"), (922, "0.90 KiB"), (1536, "1.50 KiB"),
     (8 << 30, "8.00 GiB"), (3 << 50, "3.00 PiB")],
)  # fmt: skip
def test_sizes_as_they_are_shown(nbytes, text):
    assert spelled_size(nbytes) == text


def test_sizes_are_those_of_dask():
    """They were dask's once."""
    utils = pytest.importorskip("dask.utils")
    for text, size in SIZES.items():
        if text not in ("9007199254740993", "2."):
            assert utils.parse_bytes(text) == size
    for nbytes in (0, 5, 1000, 10**6, 10**9, 2 * 10**12, 5 * 10**15):
        assert utils.format_bytes(nbytes).replace("kiB", "KiB") == spelled_size(nbytes)
