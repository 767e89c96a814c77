"""What results show of themselves, and what they hold."""

import pickle
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import zarr
from conftest import make

import ooc_gemm
from ooc_gemm.planning.search import make_plan
from ooc_gemm.support.trace import Timeline

A = np.random.default_rng(5).standard_normal((40, 30)).astype("f4")
LIMIT = {"memory_limit": "1GiB"}


class Page(HTMLParser):
    """The elements and texts of a part of a page; every element must be closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.tags.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def results(folder):
    a = make(folder / "a", A, chunks=(7, 11))
    genotypes = np.random.default_rng(6).integers(0, 3, (50, 9)).astype("i1")
    yield ooc_gemm.multiply(a, a, folder / "c", transpose_b=True, **LIMIT), "array", A @ A.T
    yield ooc_gemm.gram(a, folder / "gram", **LIMIT), "array", A @ A.T
    yield ooc_gemm.cov(a, folder / "cov", **LIMIT), "array", np.cov(A)
    yield ooc_gemm.corrcoef(a, folder / "corrcoef", **LIMIT), "array", np.corrcoef(A)
    yield ooc_gemm.grm(genotypes, folder / "grm", **LIMIT), "array", None
    yield ooc_gemm.king(genotypes, folder / "king", **LIMIT), "array", None
    target = A @ np.ones((30, 2), "f4")
    yield ooc_gemm.lstsq(a, target, folder / "w", **LIMIT), "array", np.ones((30, 2))
    yield ooc_gemm.pca(a, 3, scores=folder / "scores", **LIMIT), "scores", None
    yield ooc_gemm.svd(a, 3, u=folder / "u", **LIMIT), "u", None
    yield ooc_gemm.topk(a, a, folder / "top", k=2, **LIMIT), "values", None
    yield ooc_gemm.threshold(a, a, folder / "some", least=0.5, **LIMIT), "data", None


def test_results_hold_the_stored_array_and_show_themselves(tmp_path):
    for result, name, right in results(tmp_path):
        array = getattr(result, name)
        assert isinstance(array, zarr.Array), type(result)
        if right is not None:
            np.testing.assert_allclose(array[...], right, rtol=1e-3, atol=1e-3)
        assert repr(result).startswith(type(result).__name__ + "(")
        assert len(repr(result)) < 320
        page = Page(result._repr_html_())
        assert "table" in page.tags
        assert ("details" in page.tags) == hasattr(result, "plan")
        if hasattr(result, "plan"):
            assert len(repr(result.plan)) < 320
            assert "host memory" in Page(result.plan._repr_html_()).texts


def test_a_c_that_exists_already_is_the_array_of_the_result(tmp_path):
    c = zarr.create_array(tmp_path / "c", shape=(40, 40), chunks=(9, 9), dtype="f4")
    assert ooc_gemm.gram(A, c, **LIMIT).array is c
    old = zarr.create_array(tmp_path / "old", shape=(40, 40), chunks=(9, 9), dtype="f4", zarr_format=2)
    old.attrs["unit"] = "m"
    for _ in range(2):
        found = ooc_gemm.multiply(A, A.T, tmp_path / "old", beta=1, force=True, **LIMIT).array
        assert found.attrs["unit"] == "m"
    assert found.chunks == (9, 9)
    np.testing.assert_allclose(found[...], 2 * A @ A.T, rtol=1e-5, atol=1e-5)
    a = make(tmp_path / "a", A, chunks=(7, 11))
    for resume in (False, True):
        result = ooc_gemm.gram(a, tmp_path / "new", resume=resume, **LIMIT)
        assert "ooc-gemm" in result.array.attrs
    assert pickle.loads(pickle.dumps(result)).array == result.array


def test_a_traced_result_has_a_timeline(tmp_path):
    result = ooc_gemm.gram(A, trace=tmp_path / "trace.json", **LIMIT)
    assert set(result.timeline.busy) >= {"read", "compute"}
    for shares in result.timeline.busy.values():
        assert len(shares) == 100
        assert all(0 <= share <= 1 for share in shares)
        assert any(shares)
    assert "svg" in Page(result._repr_html_()).tags
    assert "timeline" not in result.to_dict()
    assert ooc_gemm.gram(A, **LIMIT).timeline is None


def test_nothing_that_a_result_shows_is_markup(tmp_path):
    from dataclasses import replace

    result = replace(ooc_gemm.gram(A, **LIMIT), device="<b>&\"'", timeline=Timeline(1.0, {"<i>": (0.5,)}))
    page = Page(result._repr_html_())
    assert "<b>&\"'" in page.texts
    assert "b" not in page.tags[1:2]
    assert "i" not in page.tags


def test_dask_is_an_attribute_that_is_imported_when_it_is_used():
    pytest.importorskip("dask")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, ooc_gemm\n"
            "heavy = {'dask', 'zarr', 'cupy', 'h5py', 'xarray', 'distributed'}\n"
            "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
            "assert {'dask', 'multiply', 'Result', '__version__'} <= set(dir(ooc_gemm))\n"
            "assert all(not name.startswith('_') or name.startswith('__') for name in dir(ooc_gemm))\n"
            "assert callable(ooc_gemm.dask.multiply)",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("symmetric", [False, True])
def test_what_a_result_in_memory_takes_is_predicted(symmetric):
    """It has no chunks, of which those at its edges would be written whole."""
    x = np.random.default_rng(2).normal(size=(501, 7))
    options = {"device": "cpu", "chunks": (100, 90)}
    result = ooc_gemm.gram(x, **options) if symmetric else ooc_gemm.multiply(x, x.T, **options)
    assert result.plan.bytes_written == result.bytes_written == 501 * 501 * 8
    stored = ooc_gemm.plan(x, x.T, **options)
    assert stored.bytes_written == 600 * 540 * 8


def test_the_same_product_is_planned_once(tmp_path, monkeypatch):
    """Until its arrays, its limits or the rates change. Nor is advice sought more than once."""
    planned, advised = [], []

    def noted(problem, budget, rates):
        planned.append(problem)
        return make_plan(problem, budget, rates)

    def sought(*given):
        advised.append(given)  # and there is none

    monkeypatch.setattr("ooc_gemm.run.prepare.make_plan", noted)
    monkeypatch.setattr("ooc_gemm.planning.layouts.advice", sought)
    a = make(tmp_path / "a", A, chunks=(7, 11), compressors=None)
    for times, limit in ((1, "1GiB"), (1, "1GiB"), (2, "2GiB"), (2, "1GiB")):
        found = ooc_gemm.multiply(a, a, transpose_b=True, memory_limit=limit, device="cpu")
        np.testing.assert_allclose(found.array, A @ A.T, rtol=1e-5, atol=1e-5)
        assert len(planned) == len(advised) == times
    (tmp_path / "a" / "c" / "0" / "0").unlink()
    without = A.copy()
    without[:7, :11] = 0
    found = ooc_gemm.multiply(a, a, transpose_b=True, memory_limit="1GiB", device="cpu")
    np.testing.assert_allclose(found.array, without @ without.T, rtol=1e-5, atol=1e-5)
    assert len(planned) == 3
