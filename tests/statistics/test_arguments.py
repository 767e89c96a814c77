"""Arguments that are no numbers, or none of the kind that is needed, are refused with a sentence."""

import numpy as np
import pytest
from shelf import keys

import ooc_gemm
from ooc_gemm import InputError

X = np.random.default_rng(1).standard_normal((30, 6)).astype("f4")
G = np.random.default_rng(2).integers(-1, 3, (30, 6)).astype("i1")
CPU = {"device": "cpu", "memory_limit": "1GiB"}
COUNTS = [
    ("k", lambda given: ooc_gemm.topk(X, k=given, **CPU)),
    ("components", lambda given: ooc_gemm.pca(X, given, **CPU)),
    ("components", lambda given: ooc_gemm.svd(X, given, **CPU)),
    ("iterations", lambda given: ooc_gemm.pca(X, 2, iterations=given, **CPU)),
    ("seed", lambda given: ooc_gemm.svd(X, 2, seed=given, **CPU)),
    ("ddof", lambda given: ooc_gemm.cov(X, ddof=given, **CPU)),
]
NUMBERS = [
    ("least", lambda given: ooc_gemm.threshold(X, least=given, **CPU)),
    ("ridge", lambda given: ooc_gemm.lstsq(X, X[:, 0], ridge=given, memory_limit="1GiB")),
    ("missing", lambda given: ooc_gemm.grm(G, missing=given, **CPU)),
    ("missing", lambda given: ooc_gemm.king(G, missing=given, **CPU)),
    ("maf", lambda given: ooc_gemm.grm(G, maf=given, **CPU)),
]
WORDS = {
    "device": lambda given: ooc_gemm.multiply(X, X.T, device=given),
    "device of a plan": lambda given: ooc_gemm.plan(X, X.T, device=given),
    "device of pca": lambda given: ooc_gemm.pca(X, 2, device=given),
    "device of topk": lambda given: ooc_gemm.topk(X, k=2, device=given),
    "precision": lambda given: ooc_gemm.multiply(X, X.T, precision=given),
    "kernel": lambda given: ooc_gemm.multiply(X, X.T, kernel=given),
    "compressor": lambda given: ooc_gemm.multiply(X, X.T, compressor=given),
    "triangle": lambda given: ooc_gemm.gram(X, triangle=given),
    "center": lambda given: ooc_gemm.gram(ooc_gemm.Operand(X, center=given)),
    "axis": lambda given: ooc_gemm.gram(ooc_gemm.Operand(X, center=(given, np.ones(30)))),
    "metric": lambda given: ooc_gemm.topk(X, k=2, metric=given),
    "score": lambda given: ooc_gemm.threshold(X, least=0, metric=given),
    "method": lambda given: ooc_gemm.grm(np.abs(G), method=given),
    "distribution": lambda given: ooc_gemm.random("never", (3, 3), distribution=given),
}
OUTPUTS = {
    "pca": lambda out: ooc_gemm.pca(X, 2, scores=out, **CPU),
    "svd": lambda out: ooc_gemm.svd(X.T, 2, u=out, **CPU),
    "lstsq": lambda out: ooc_gemm.lstsq(X, X[:, 0], out, memory_limit="1GiB"),
    "cov": lambda out: ooc_gemm.cov(X, out, **CPU),
    "corrcoef": lambda out: ooc_gemm.corrcoef(X, out, **CPU),
    "gram": lambda out: ooc_gemm.gram(ooc_gemm.Operand(X, center="rows"), out, **CPU),
    "king": lambda out: ooc_gemm.king(np.abs(G), out, **CPU),
    "grm": lambda out: ooc_gemm.grm(np.abs(G), out, **CPU),
    "topk": lambda out: ooc_gemm.topk(X, None, out, k=2, **CPU),
    "threshold": lambda out: ooc_gemm.threshold(X, None, out, least=0.5, **CPU),
}


@pytest.mark.parametrize("given", [2.5, "2", "a", True, np.ones(2), 1j])
@pytest.mark.parametrize(("name", "call"), COUNTS)
def test_counts(name, call, given):
    with pytest.raises(InputError, match=rf"^{name} is .*; give an integer"):
        call(given)


@pytest.mark.parametrize(("name", "call"), COUNTS)
def test_integers_of_numpy_are_counts(name, call):
    call(np.int64(2))
    call(np.array(2, "u1"))


@pytest.mark.parametrize("given", ["a", "1", np.ones(2), 1j, [1], object()])
@pytest.mark.parametrize(("name", "call"), NUMBERS)
def test_numbers(name, call, given):
    with pytest.raises(InputError, match=rf"^{name} is .*; give a number"):
        call(given)


@pytest.mark.parametrize(("name", "call"), NUMBERS)
def test_any_kind_of_number(name, call):
    for given in (-1 if name == "missing" else 0.25, np.float32(0.25) if name != "missing" else np.int8(-1)):
        call(given)


def test_what_is_out_of_range():
    with pytest.raises(InputError, match="seed is -1; give an integer of 0 or more"):
        ooc_gemm.pca(X, 2, seed=-1, **CPU)
    with pytest.raises(InputError, match="least is None; give a number"):
        ooc_gemm.threshold(X, least=None, **CPU)
    np.testing.assert_array_equal(ooc_gemm.cov(X, ddof=1.0, **CPU).array, ooc_gemm.cov(X, **CPU).array)


@pytest.fixture
def no_pass(monkeypatch):
    """What reads an array fails."""

    def read(*args, **options):
        raise AssertionError("a pass is made")

    monkeypatch.setattr("ooc_gemm.run.stream._Pass._run", read)
    monkeypatch.setattr("ooc_gemm.statistics.rescore.Rows.each", read)
    monkeypatch.setattr("ooc_gemm.statistics.relationship._once", lambda *_: None)  # so it makes a pass


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_that_cannot_be_created_is_refused_before_anything_is_read(tmp_path, no_pass, name):
    for place in (tmp_path / ("n" * 300), tmp_path / "deep" / "below" / ("n" * 300)):
        with pytest.raises(InputError, match=r"n\S* cannot be created.*name too long"):
            OUTPUTS[name](str(place))
    assert not list(tmp_path.iterdir())
    with pytest.raises(AssertionError, match="a pass is made"):
        OUTPUTS[name](str(tmp_path / "deep" / "out"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_store_that_takes_nothing_is_refused_before_anything_is_read(shelf, proxy, no_pass, name):
    proxy.fault = lambda method, path: 403 if method == "PUT" else None
    with pytest.raises(InputError, match=r"out cannot be reached .*; check its address and credentials"):
        OUTPUTS[name](f"{shelf}/out")
    proxy.fault = lambda method, path: None
    with pytest.raises(AssertionError, match="a pass is made"):
        OUTPUTS[name](f"{shelf}/out")
    assert keys(shelf) == []


@pytest.mark.parametrize("given", [X, X[0], np.array([1]), ["cpu", "cuda"], object(), 3])
@pytest.mark.parametrize("name", WORDS)
def test_what_is_no_word(name, given):
    with pytest.raises(InputError, match=r"; (give|choose|use|write) "):
        WORDS[name](given)
