"""Credentials of object stores: a real S3 server, a real cluster, and a search for their bytes in all that
crosses the network to the scheduler, in task graphs, and in what is said and stored."""

import contextlib
import os
import pickle
import socket
import threading
import traceback

import cloudpickle
import numpy as np
import pytest
import s3
import zarr
from conftest import ooc

distributed = pytest.importorskip("distributed")

import dask  # noqa: E402
import dask.array as da  # noqa: E402

import ooc_gemm  # noqa: E402
import ooc_gemm.dask  # noqa: E402
from ooc_gemm import InputError  # noqa: E402
from ooc_gemm.storage.read import addresses, metadata  # noqa: E402
from ooc_gemm.support import redact  # noqa: E402

pytestmark = [
    pytest.mark.skipif(bool(s3.missing()), reason=s3.missing() or "-"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

RNG = np.random.default_rng(3)
A, B = RNG.integers(-9, 9, (60, 80)).astype("f4"), RNG.integers(-9, 9, (80, 50)).astype("f4")
PASSWORD = "pass/word-that-nobody-sees"
SECRETS = s3.KEY, s3.SECRET, PASSWORD
CPU = {"device": "cpu", "memory_limit": "512MiB"}


def bytes_of(secret):
    """How a credential may be written."""
    return {secret.encode(), redact.quote(secret, safe="").encode(), secret.encode("utf-16-le")}


def show(data):
    """The credentials that bytes hold."""
    return [secret for secret in SECRETS if any(one in data for one in bytes_of(secret))]


class Listener:
    """Passes on what comes to its port, and keeps all of it."""

    def __init__(self, address):
        self.heard, self._target, self._open = bytearray(), address, []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        with contextlib.suppress(OSError):
            while True:
                here, there = self._server.accept()[0], socket.create_connection(self._target)
                self._open += [here, there]
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.heard += data
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self):
        for one in (self._server, *self._open):
            one.close()


@pytest.fixture(scope="module")
def environment(server, tmp_path_factory):
    """Credentials stand in the environment, of this process and of what it starts."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("AWS_"):
                patch.delenv(name)
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        for name, value in s3.environment(server).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def shelf(environment):
    """Where A and B are stored."""
    address = f"s3://{s3.BUCKET}/secrets"
    for name, values in (("a", A), ("b", B)):
        zarr.create_array(addresses.remote_place(f"{address}/{name}"), data=values, chunks=(20, 30))
    return address


@pytest.fixture(scope="module")
def cluster(environment):
    """A client of two worker processes, and what it and the scheduler tell each other."""
    config = {"distributed.comm.compression": None}
    with (
        dask.config.set(config),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit="1GiB", dashboard_address=None
        ) as workers,
    ):
        host, port = workers.scheduler_address.removeprefix("tcp://").split(":")
        listener = Listener((host, int(port)))
        with distributed.Client(f"tcp://127.0.0.1:{listener.port}") as client:
            yield client, listener
        listener.close()


def explicit(name, server, secret=s3.SECRET):
    """An open array whose store has been given its credentials."""
    from obstore.store import S3Store

    client = S3Store(
        s3.BUCKET,
        access_key_id=s3.KEY,
        secret_access_key=secret,
        endpoint=f"http://127.0.0.1:{server}",
        region="us-east-1",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    at = zarr.storage.StorePath(zarr.storage.ObjectStore(client), f"secrets/{name}")
    return zarr.open_array(at, mode="r")


def through_fsspec(name, server):
    """The same, by way of fsspec, where storage options hold the credentials."""
    import fsspec
    from obstore.fsspec import FsspecStore as Obstore

    fsspec.register_implementation("s3", Obstore, clobber=True)
    config = {
        "access_key_id": s3.KEY,
        "secret_access_key": s3.SECRET,
        "endpoint": f"http://127.0.0.1:{server}",
        "region": "us-east-1",
    }
    system = Obstore("s3", config=config, client_options={"allow_http": True}, asynchronous=True)
    return zarr.open_array(
        zarr.storage.FsspecStore(system, path=f"{s3.BUCKET}/secrets/{name}", read_only=True), mode="r"
    )


OPENED = {"obstore": explicit, "fsspec": through_fsspec}


def test_show_finds_what_pickles_hold(shelf, server):
    assert show(pickle.dumps(explicit("a", server))) == [s3.KEY, s3.SECRET]
    assert show(pickle.dumps(through_fsspec("a", server))) == [s3.KEY, s3.SECRET]


# ---------------------------------------------------------------------------------------------- multiply


@pytest.mark.slow
def test_a_product_on_a_cluster_sends_no_credentials(tmp_path, shelf, cluster):
    client, listener = cluster
    listener.heard.clear()
    options = {"client": client, **CPU}
    ooc_gemm.dask.multiply(f"{shelf}/a", f"{shelf}/b", tmp_path / "c", chunks=(20, 25), **options)
    opened = [metadata.open_array(f"{shelf}/{name}", name) for name in "ab"]
    ooc_gemm.dask.multiply(*opened, tmp_path / "d", **options)
    for name in "cd":
        assert np.array_equal(zarr.open_array(tmp_path / name)[:], A @ B)
        assert show((tmp_path / name / "zarr.json").read_bytes()) == []
    assert b"ooc_gemm" in listener.heard
    assert show(listener.heard) == []
    assert show(repr(client.get_worker_logs()).encode() + repr(client.get_scheduler_logs()).encode()) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", OPENED)
def test_arrays_opened_with_credentials_are_not_sent(tmp_path, shelf, server, cluster, how):
    client, listener = cluster
    listener.heard.clear()
    a, b = (OPENED[how](name, server) for name in "ab")
    with pytest.raises(InputError, match=r"credentials.*are not sent to workers") as refused:
        ooc_gemm.dask.multiply(a, b, tmp_path / "c", client=client, **CPU)
    assert show(str(refused.value).encode()) == []
    assert show(listener.heard) == []
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "url", [f"http://ann:{redact.quote(PASSWORD, safe='')}@127.0.0.1/a", f"http://127.0.0.1/a?sig={PASSWORD}"]
)
def test_addresses_with_credentials_are_not_sent(tmp_path, shelf, cluster, url):
    client, listener = cluster
    listener.heard.clear()
    for pair in ((url, f"{shelf}/b"), (f"{shelf}/a", url)):
        with pytest.raises(InputError, match=r"credentials.*are not sent to workers") as refused:
            ooc_gemm.dask.multiply(*pair, tmp_path / "c", client=client, **CPU)
        assert show(str(refused.value).encode()) == []
    assert show(listener.heard) == []


@pytest.mark.slow
def test_errors_of_workers_hold_no_credentials(tmp_path, shelf, server, cluster):
    """They come back with the worker's traceback, and the scheduler and its log keep them."""
    client, listener = cluster
    proxy = s3.Proxy(server)
    port = proxy.port
    client.run(lambda: os.environ.update(AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}"))
    listener.heard.clear()
    try:
        proxy.fault = lambda method, path: 403 if "/a/c/" in path else None
        with pytest.raises(ooc_gemm.StoreError, match="cannot be fetched") as error:
            ooc_gemm.dask.multiply(f"{shelf}/a", f"{shelf}/b", tmp_path / "c", client=client, **CPU)
    finally:
        proxy.close()
        client.run(lambda: os.environ.update(AWS_ENDPOINT_URL=f"http://127.0.0.1:{server}"))
    assert show("".join(traceback.format_exception(error.value)).encode()) == []
    assert show(listener.heard) == []
    assert show(repr(client.get_worker_logs()).encode() + repr(client.get_scheduler_logs()).encode()) == []


@pytest.mark.slow
def test_the_command_line_with_a_cluster(tmp_path, shelf):
    args = [f"{shelf}/a", f"{shelf}/b", tmp_path / "c", "-d", "cpu", "-M", "900MiB", "-v", "--json"]
    done = ooc("multiply", *args, "--scheduler", "local:2")
    assert done.code == 0, done.err
    assert np.array_equal(zarr.open_array(tmp_path / "c")[:], A @ B)
    text = done.out + done.err + (tmp_path / "c" / "zarr.json").read_text()
    assert show(text.encode()) == []


# ---------------------------------------------------------------------------------------------- matmul


def ours(z):
    """The part of a product's graph that we have made, as it is sent."""
    return cloudpickle.dumps(dict(z.dask.layers[z.name]))


@pytest.mark.slow
@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("how", OPENED)
def test_matmul_adds_no_credentials_to_a_graph(shelf, server, cluster, how, inline):
    client, _ = cluster
    x, y = (da.from_zarr(OPENED[how](name, server), inline_array=inline) for name in "ab")
    for left, right, want in ((x, y, A @ B), (x + 1, y, (A + 1) @ B), (x, x.T, A @ A.T)):
        z = ooc_gemm.dask.matmul(left, right)
        assert show(ours(z)) == []
        assert show(repr(z.dask).encode() + repr(list(z.dask.keys())).encode()) == []
        with client.as_current():
            assert np.array_equal(z.compute(), want)
        assert np.array_equal(z.compute(scheduler="threads"), want)


def test_matmul_reads_stored_arrays_itself(shelf, server):
    """Also where their store was given credentials: its tasks name what the user's graph holds."""
    x, y = (da.from_zarr(explicit(name, server)) for name in "ab")
    z = ooc_gemm.dask.matmul(x, y)
    (made,) = dask.optimize(z)
    assert len(made.dask) <= z.npartitions + 2 + len(dict(z.dask.layers[z.name])), "no task reads a chunk"
    assert not any("getter" in str(task) for task in dict(made.dask).values())


# ---------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("how", OPENED)
def test_products_of_open_arrays_say_nothing(tmp_path, shelf, server, how):
    said = []
    a, b = (OPENED[how](name, server) for name in "ab")
    trace = tmp_path / "trace.json"
    result = ooc_gemm.multiply(a, b, tmp_path / "c", notice=said.append, trace=trace, **CPU)
    assert np.array_equal(zarr.open_array(tmp_path / "c")[:], A @ B)
    texts = [repr(result), str(result.to_dict()), result.plan.table(), trace.read_text(), *said]
    with pytest.raises(InputError) as refused:
        ooc_gemm.multiply(a, a, tmp_path / "d", **CPU)
    texts += traceback.format_exception(refused.value)
    texts += [path.read_text() for path in (tmp_path / "c").glob("*.json")]
    assert show("".join(texts).encode()) == []


@pytest.mark.parametrize("how", OPENED)
def test_what_a_store_says_is_searched_for_its_credentials(shelf, server, how, monkeypatch):
    """Those of an open array are known from then on, in whatever text they turn up."""
    ooc_gemm.plan(*(OPENED[how](name, server) for name in "ab"), **CPU)
    for name in s3.environment(server):
        monkeypatch.delenv(name)
    assert redact.redacted(f"denied to {s3.KEY} with {s3.SECRET}") == "denied to *** with ***"


def test_usage_errors():
    url = f"http://ann:{PASSWORD.replace('/', '-')}@127.0.0.1/a?sig={PASSWORD}"
    for args in (("multiply", "a", "b", "c", url), ("plan", "a", "b", "--device-memory-limit", url), (url,)):
        done = ooc(*args)
        assert done.code == 2
        assert PASSWORD not in done.err
        assert "ann" not in done.err
        assert "127.0.0.1" in done.err


def test_secrets_in_options():
    """What is not known to be public counts as secret."""
    public = {
        "bucket": "shelf",
        "endpoint": "http://127.0.0.1:80",
        "region": "us-east-1",
        "skip_signature": "true",
        "anon": True,
        "client_kwargs": {"endpoint_url": "https://host", "region_name": "eu"},
        "timeout": 3.5,
        "retries": None,
    }
    assert list(redact.secrets_in(public)) == []
    for name, value in (
        ("key", PASSWORD),
        ("client_kwargs", {"aws_session_token": PASSWORD}),
        ("endpoint", f"http://ann:{PASSWORD}@host"),
        ("path", f"http://host/a?sig={PASSWORD}"),
        ("headers", {"Authorization": PASSWORD.encode()}),
        ("anything", [1, (PASSWORD,)]),
        ("credential", object()),
    ):
        assert list(redact.secrets_in(public | {name: value})), name


@pytest.mark.parametrize(
    "url",
    [
        "s3://shelf/a@2/b",
        "http://host:8080/a@2",
        "abfss://shelf@account.dfs.core.windows.net/a",
        "az://shelf/a",
        "http://[::1]:80/a",
    ],
)
def test_addresses_without_credentials(url):
    assert addresses.portable(url) == url
    redact.keep_secrets_of(url)
    assert redact.redacted("shelf account") == "shelf account"


@pytest.mark.parametrize("password", ["simple", "with/slash", "with@sign", "8080x"])
def test_addresses_with_credentials(password):
    url = f"http://someone:{password}@host:80/a"
    assert addresses.portable(url) is None
    assert redact.url(f"no answer from {url}?sig=xyz now") == "no answer from http://***@host:80/a?*** now"
