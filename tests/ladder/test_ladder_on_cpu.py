"""The ladder without a GPU: results, counts, the command, the experiments and the notebook. (What the
emulator finds: tests/cuda_kernels/test_emulated.py.)"""

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ooc_gemm.cuda_kernels.config import Config
from ooc_gemm.cuda_kernels.roofline import work
from ooc_gemm.ladder import RUNGS, Counts, Run, climb, experiments, rungs
from ooc_gemm.ladder import __main__ as command
from ooc_gemm.ladder.emulator import SIGNATURE, Emulator, Problem, compiler_missing
from ooc_gemm.ladder.rungs import HOPPER_RUNGS

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "ladder.ipynb"


@pytest.fixture
def compiler():
    if why := compiler_missing():
        pytest.skip(why)


def said(*args):
    """Exit status and output of the command."""
    done = CliRunner().invoke(command.main, args)
    return done.exit_code, done.output


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_the_naive_kernel_reads_two_elements_for_each_product():
    m, n, k = 33, 5, 7
    status, output = said("naive", "--m", str(m), "--n", str(n), "--k", str(k), "--json")
    (found,) = json.loads(output)
    assert status == 0
    assert found["correct"]
    assert (found["global_loads"], found["global_stores"]) == (2 * m * n * k, m * n)
    assert found["operations"] == 2 * m * n * k + m * n  # and α
    assert found["shared_loads"] == found["shared_stores"] == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ladder"], "There is no rung 'ladder'"),
        (["naive", "producer"], "'producer' needs a GPU of compute capability 9.0"),
        (["warptile", "--dtype", "int32"], "takes float32, float64, not int32"),
        (["naive", "--size", "513"], "512×512"),
        (["naive", "--k", "0"], "1 or more"),
    ],
)
def test_what_cannot_be_run_is_refused(args, message):
    status, output = said(*args)
    assert status == 2
    assert message in output


def test_rungs_that_need_a_gpu_are_named():
    _, help_text = said("--help")
    assert f"{', '.join(HOPPER_RUNGS[:-1])} and {HOPPER_RUNGS[-1]}" in " ".join(help_text.split())


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_the_list_of_all_rungs_ends_with_those_that_need_a_gpu():
    status, output = said("--size", "9")
    assert status == 0, output
    assert output.splitlines()[-1].startswith(f"{', '.join(HOPPER_RUNGS)}: ")


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(rungs, "compiler_missing", lambda: "running kernels on the CPU needs g++")
    status, output = said("naive")
    assert status == 1
    assert "apt install g++" in output


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_counted_loads_are_those_of_the_formula():
    """With all types, at a shape that no tile divides."""
    m, n, k = 70, 131, 37
    runs = [Run.of(rung, m, n, k, dtype) for rung in RUNGS for dtype in ("float32", "float64")]
    for outcome in climb(runs):
        config, counts = outcome.run.config, outcome.counts
        assert outcome.correct, outcome
        tile = (1, 1) if config.kernel == "naive" else (config.bm, config.bn)
        asked = work(config.dtype, m, n, k, tile)
        assert (counts.global_loads, counts.global_stores) == (asked.loads, asked.stores), outcome
        assert outcome.nbytes == asked.nbytes
        assert counts.operations >= 2 * m * n * k
        assert (counts.shared_loads > 0) == (config.kernel != "naive")


TOYS = {
    # a kernel for one warp: elements, lines or passes of each kind, in the order of Counts
    "T x = A[threadIdx.x]; C[threadIdx.x] = x;": (0, 32, 32, 0, 0, 1, 1, 0, 0),
    "C[threadIdx.x] = A[32 * threadIdx.x];": (0, 32, 32, 0, 0, 32, 1, 0, 0),
    "C[threadIdx.x] = A[0] + A[1];": (32, 64, 32, 0, 0, 2, 1, 0, 0),
    "__shared__ T x[32]; x[threadIdx.x] = A[5]; T y = x[0];": (0, 32, 0, 32, 32, 1, 0, 1, 1),
    "__shared__ T x[32][32]; x[threadIdx.x][0] = A[5]; T y = x[threadIdx.x][0];": (
        0, 32, 0, 32, 32, 1, 0, 32, 32,
    ),
    "__shared__ T x[32][33]; x[threadIdx.x][0] = A[5]; T y = x[threadIdx.x][0];": (
        0, 32, 0, 32, 32, 1, 0, 1, 1,
    ),
    "struct alignas(16) Vec {\n    T v[V];\n};\nconst Vec* in = reinterpret_cast<const Vec*>(A);\n"
    "Vec* out = reinterpret_cast<Vec*>(C); out[threadIdx.x] = in[threadIdx.x];": (
        0, 128, 128, 0, 0, 4, 4, 0, 0,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("body", TOYS)
def test_accesses_of_a_warp_are_counted_as_lines_and_passes(tmp_path, body):
    config = Config("toy", "float32", 32, 32, (32, 1), (("ELEMENT", "float"),))
    head = f'using T = ELEMENT;\nconstexpr int V = 4;\nextern "C" __global__ void toy({SIGNATURE})'
    source = f"{head} {{\n{body}\n}}\n"
    emulator = Emulator(tmp_path, {"toy": (config, source)}, counting=True)
    a, c = np.ones((32, 32), "f4"), np.zeros((32, 32), "f4")
    (_, counts), (_, again) = emulator.run_counted("toy", [Problem(32, 32, 32, 1, a, a, 0, c, "forward")] * 2)
    assert tuple(getattr(counts, field.name) for field in fields(Counts)) == TOYS[body]
    assert counts == again, "each problem begins at 0"


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_every_experiment_is_one_command(monkeypatch, name):
    """With smaller matrices than the command takes."""
    monkeypatch.setattr(
        command, "climb", lambda runs: climb([replace(run, m=run.m // 2, n=run.n // 2, k=9) for run in runs])
    )
    status, output = said("--experiment", name)
    assert status == 0, output
    assert "ooc-gemm bench kernels" in output
    assert "agrees" in output
    table = output.split("\n\n")[1].splitlines()
    assert len(table) == 1 + len(experiments.EXPERIMENTS[name].runs())
    assert max(map(len, table)) <= 80


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_the_notebook_runs():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    notebook, names = json.loads(NOTEBOOK.read_text("utf-8")), {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "outputs are not kept"
            exec("".join(cell["source"]), names)
    assert len(pyplot.get_fignums()) == 4
    pyplot.close("all")
