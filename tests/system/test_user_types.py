"""What mypy says of programs that use this package: its public functions have full, typed signatures."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

import ooc_gemm

api = pytest.importorskip("mypy.api")

GOOD = """
import ooc_gemm

result = ooc_gemm.multiply("a", "b", "c", alpha=2, memory_limit="8GiB", precision="high", chunks=(512, 512))
print(result.tflops, ooc_gemm.gram("a", transpose=True).array)
plan: ooc_gemm.Plan = ooc_gemm.plan("a", "b", device="cpu")
x = ooc_gemm.Operand("a", center="columns", scale=("rows", [1.0, 2.0]), missing=-1, weights=[1, 2])
print(ooc_gemm.gram(x).bytes_passed, ooc_gemm.cov("a", rowvar=False, aweights=[1, 2]).mean)
k: ooc_gemm.Relationship = ooc_gemm.grm("g", samples=0, method="vanraden", maf=0.05)
f: ooc_gemm.Kinship = ooc_gemm.king("g", "c", samples=1, verify=True)
r: ooc_gemm.Covariance = ooc_gemm.corrcoef("a", "c", memory_limit="8GiB")
nearest: ooc_gemm.Neighbours = ooc_gemm.topk("a", "b", k=3, metric="dot")
alike: ooc_gemm.Threshold = ooc_gemm.threshold("a", out="t", least=0.9, metric="correlation")
check: ooc_gemm.Check = ooc_gemm.verify("a", "b", "c", rounds=3)
found: ooc_gemm.PCA = ooc_gemm.pca("a", 20, iterations=2, scores="s")
print(found.components, ooc_gemm.svd("a", 3).singular_values)
w: ooc_gemm.LeastSquares = ooc_gemm.lstsq("a", "b", ridge=0.5, intercept=True)
"""
BAD = {
    'ooc_gemm.multiply("a", "b", memory_limt="8GiB")': "memory_limt",
    'ooc_gemm.gram("a", precision="best")': "precision",
    'ooc_gemm.plan("a", "b", force=True)': "force",
    'ooc_gemm.multiply("a", "b", chunks=512)': "chunks",
    'ooc_gemm.multiply("a", "b").seconds.upper()': "upper",
    'ooc_gemm.Operand("a", center="cols")': "center",
    'ooc_gemm.cov("a", alpha=2)': "alpha",
    'ooc_gemm.grm("g", method="king")': "method",
}


@pytest.mark.slow  # mypy reads NumPy anew
def test_mypy_accepts_what_is_right_and_names_what_is_wrong(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = GOOD.splitlines()
    Path("program.py").write_text("\n".join([*lines, *BAD, ""]))
    said, _, code = api.run(["--strict", "--no-incremental", "--follow-imports=silent", "program.py"])
    assert code == 1
    for number, word in enumerate(BAD.values(), len(lines) + 1):
        (line,) = [line for line in said.splitlines() if line.startswith(f"program.py:{number}: error")]
        assert word in line
    assert said.count(" error: ") == len(BAD), said


@pytest.mark.parametrize(
    "name",
    [
        "multiply",
        "gram",
        "plan",
        "verify",
        "random",
        "cov",
        "corrcoef",
        "pca",
        "svd",
        "topk",
        "threshold",
        "grm",
        "king",
        "lstsq",
        "dask.multiply",
        "dask.matmul",
    ],
)
def test_docstrings_list_every_parameter(name):
    if "dask" in name:
        pytest.importorskip("distributed")
        import_module("ooc_gemm.dask")
    function = ooc_gemm
    for part in name.split("."):
        function = getattr(function, part)
    text = inspect.getdoc(function)
    section = text[text.index("Parameters\n-----") : text.index("Returns\n-----")]
    listed = [
        word
        for line in section.splitlines()
        if " : " in line and not line.startswith(" ")
        for word in line.partition(" : ")[0].split(", ")
    ]
    parameters = inspect.signature(function).parameters.values()
    assert sorted(listed) == sorted(one.name for one in parameters)
    assert all(one.kind is not one.VAR_KEYWORD for one in parameters)
    assert "Raises\n------" in text
