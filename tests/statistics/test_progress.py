"""The progress of statistics is 1 when all of their output is written, and not before."""

import numpy as np
import pytest
from conftest import ooc
from test_dataset import calls_of, store

import ooc_gemm

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # texts in zarr

X = np.random.default_rng(1).standard_normal((90, 6)).astype("f4")
CPU = {"device": "cpu", "memory_limit": "1GiB"}
CALLS = {
    "pca": lambda out, **told: ooc_gemm.pca(X, 2, scores=out, **told, **CPU),
    "pca of the transpose": lambda out, **told: ooc_gemm.pca(X.T, 2, scores=out, **told, **CPU),
    "svd": lambda out, **told: ooc_gemm.svd(X, 2, u=out, **told, **CPU),
    "svd in one pass more": lambda out, **told: ooc_gemm.svd(X * np.float32(1e30), 2, u=out, **told, **CPU),
    "lstsq": lambda out, **told: ooc_gemm.lstsq(X, X[:, 0], out, memory_limit="1GiB", **told),
    "cov": lambda out, **told: ooc_gemm.cov(X, out, rowvar=False, **told, **CPU),
    "topk": lambda out, **told: ooc_gemm.topk(X, None, out, k=2, graph=True, **told, **CPU),
    "threshold": lambda out, **told: ooc_gemm.threshold(X, None, out, least=0.5, **told, **CPU),
    "grm": lambda out, **told: ooc_gemm.grm("g", out, **told, **CPU),
    "king": lambda out, **told: ooc_gemm.king("g", out, **told, **CPU),
}


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_one_when_all_is_written(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    store("g", calls_of(np.random.default_rng(2).integers(0, 3, (90, 6))))
    fractions, found, out = [], [], tmp_path / "out"

    def told(fraction, *_):
        fractions.append(fraction)
        found.extend([files(out)] if fraction >= 1 else [])

    CALLS[name](str(out), progress=told)
    assert found == [files(out)]
    assert len(fractions) > 1
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1


@pytest.mark.parametrize(("command", "option"), [("pca", "--save-components"), ("svd", "--save-vt")])
def test_files_that_a_command_writes_at_the_end(tmp_path, monkeypatch, command, option):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", X)
    bars = []

    class Bar:
        def __enter__(self):
            return lambda fraction: bars.append((fraction, (tmp_path / "v").exists()))

        def __exit__(self, *_):
            pass

    monkeypatch.setattr("ooc_gemm.cli.components.share_bar", lambda wanted: Bar())
    assert ooc(command, "x.npy", "out", "-k", "2", option, "v", "-d", "cpu", "-M", "1GiB").code == 0
    assert bars[-1] == (1, True)
    assert all(fraction < 1 for fraction, _ in bars[:-1])
