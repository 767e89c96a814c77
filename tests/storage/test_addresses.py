"""Addresses of object stores: which are known, and how stores that are not Amazon's differ."""

import pytest
from conftest import ooc

obstore = pytest.importorskip("obstore")

import zarr  # noqa: E402
from zarr.storage import MemoryStore, ObjectStore  # noqa: E402

from ooc_gemm import InputError  # noqa: E402
from ooc_gemm.storage.io import client, objects  # noqa: E402
from ooc_gemm.storage.io.answers import Answers  # noqa: E402
from ooc_gemm.storage.io.objects import Objects  # noqa: E402
from ooc_gemm.storage.read import addresses  # noqa: E402
from ooc_gemm.storage.read.metadata import array_at  # noqa: E402


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """An environment that names no store."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (
        "AZURE_STORAGE_ACCOUNT_NAME",
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_ENDPOINT",
        "GOOGLE_BASE_URL",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("url", ["foo://x/a", "ftp://x/a", "memory://a", "s4://shelf/a"])
def test_unknown_schemes_are_refused(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ooc("random", "a", "--shape", "3,3").code == 0
    for operands in ((url, "a", "c"), ("a", "a", url)):
        done = ooc("multiply", *operands)
        scheme = url.partition("://")[0]
        assert done.code == 2
        assert f"{url}: addresses that begin with {scheme}:// are not known; give a path, or" in done.err
        assert "s3://, gs://, az://, abfs://, abfss://, http://, https:// or file://" in done.err


def test_azure_needs_an_account(alone):
    with pytest.raises(InputError, match=r"az://shelf/a needs the name of its storage account; set AZURE_"):
        client.connect("az://shelf/a", 10)


def test_an_open_array_in_azure_has_a_name(alone, monkeypatch):
    """obstore cannot spell a store whose account it has found in the environment, which zarr asks for."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5LXRoYXQtbm9ib2R5LXNlZXM=")
    blank = zarr.create_array(MemoryStore(), shape=(3, 3), dtype="f4")
    for url in ("az://shelf/x", "az://shelf"):
        array = array_at(blank.metadata, addresses.remote_place(url))
        assert addresses.describe(array) == url
        assert 'account_name="account"' in repr(array.store_path.store.store)


def test_an_emulator_of_azure_has_a_name(alone, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    store, _ = client.connect("az://shelf/a", 10)
    assert 'account_name="devstoreaccount1"' in repr(store)


@pytest.mark.parametrize(
    ("url", "name", "value"),
    [
        ("az://shelf/a", "AZURE_ENDPOINT", "http://127.0.0.1:1/account"),
        ("gs://shelf/a", "GOOGLE_BASE_URL", "http://127.0.0.1:1"),
    ],
)
def test_endpoints_without_tls(alone, monkeypatch, url, name, value):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    for endpoint, allowed in ((value, True), (value.replace("http", "https"), False)):
        monkeypatch.setenv(name, endpoint)
        store, _ = client.connect(url, 10)
        assert ("allow_http" in (store.client_options or {})) == allowed


def test_a_tag_is_the_same_with_and_without_quotes():
    """Azure quotes it in headers and not in lists."""
    quoted, plain = ({"e_tag": tag, "version": None} for tag in ('"0x8D1"', "0x8D1"))
    assert objects._tag(quoted) == objects._tag(plain) != objects._tag({"e_tag": "0x8D2"})


def test_what_is_not_there_is_removed_with_the_rest(tmp_path):
    """As Azure's, this store refuses to remove what is not there."""
    store = obstore.store.LocalStore(tmp_path)
    with pytest.raises(FileNotFoundError):
        obstore.delete(store, ["x/none"])
    place = Objects(store, "x", Answers(ObjectStore(store)))
    for key in ("a", "b"):
        place.put(key, b"1")
    place.delete(["none", "a", "no more", "b"])
    assert list(place.all_keys()) == []
