"""Arrays in an object store that is reached by TLS: a real S3 server behind a proxy on loopback, whose
certificate no authority of this system has signed."""

import contextlib

import numpy as np
import pytest
import s3
import tls
from conftest import ooc
from shelf import got, keys, put

import ooc_gemm
from ooc_gemm.storage.io import answers

pytestmark = pytest.mark.skipif(bool(s3.missing()), reason=s3.missing() or "-")

RNG = np.random.default_rng(31)
A, B = RNG.integers(-9, 9, (130, 70)).astype("f4"), RNG.integers(-9, 9, (70, 90)).astype("f4")


@pytest.fixture
def stored(shelf):
    """A and B, which were put without TLS."""
    put(f"{shelf}/a", A, chunks=(50, 40))
    put(f"{shelf}/b", B, chunks=(40, 50))
    return shelf


@pytest.fixture
def by_tls(server, proxy, monkeypatch, tmp_path):
    """Lets clients reach the store by TLS, with a certificate that is valid for so many days. Its file."""
    with contextlib.ExitStack() as stack:

        def lead(days=1):
            files = tls.certificate(tmp_path, days)
            port = stack.enter_context(tls.in_front_of(server, files))
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{port}")
            return files[0]

        yield lead


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
def test_a_certificate_that_the_environment_names_is_trusted(
    stored, by_tls, monkeypatch, tmp_path, proxy, name
):
    certificate = by_tls()
    monkeypatch.setenv(name, str(certificate if name == "SSL_CERT_FILE" else certificate.parent))
    a, b, c = (f"{stored}/{name}" for name in "abc")
    proxy.seen.clear()
    assert ooc("multiply", a, b, c, "-d", "cpu").code == 0
    assert ooc("multiply", a, b, c, "-d", "cpu", "--beta", "2").code == 0
    assert proxy.seen == [], "something was asked for without TLS"
    assert np.array_equal(got(c), 3 * (A.astype("f8") @ B))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("days", "fault", "advice"),
    [
        (1, "UnknownIssuer", "set SSL_CERT_FILE to the file of the certificate that has signed it"),
        (-1, "Expired", "renew it, or give the address that it is for"),
    ],
)
def test_a_certificate_that_is_not_trusted(stored, by_tls, monkeypatch, proxy, days, fault, advice):
    there = keys(stored)
    monkeypatch.setattr(answers, "TIMEOUT", 4.0)  # the client tries again what cannot succeed
    certificate = by_tls(days)
    if fault == "Expired":
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    done = ooc("multiply", f"{stored}/a", f"{stored}/b", f"{stored}/c", "-d", "cpu")
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert f"Error: {stored}/a cannot be opened (" in done.err
    assert f"its TLS certificate is not trusted: {fault}" in done.err
    assert advice in done.err
    with pytest.raises(ooc_gemm.InputError, match=f"not trusted: {fault}"):
        ooc_gemm.multiply(A, B, f"{stored}/c", device="cpu")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    assert keys(stored) == there
