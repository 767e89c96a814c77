"""TLS in front of a server on loopback, with a certificate that nobody has signed."""

import contextlib
import datetime
import ipaddress
import select
import socket
import ssl
import threading

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


def certificate(folder, days=1):
    """The file of a certificate for 127.0.0.1 that is valid for so many days from now, and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "loopback")])
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 9 * DAY)
        .not_valid_after(now + days * DAY)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return files


@contextlib.contextmanager
def in_front_of(port, files):
    """The port where a server of plain HTTP is reached by TLS. files: as of `certificate`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    threading.Thread(target=_listen, args=(listener, context, port), daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _listen(listener, context, port):
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_serve, args=(client, context, port), daemon=True).start()


def _serve(client, context, port):
    with (
        client,
        contextlib.suppress(OSError),  # as of a client that does not trust the certificate
        context.wrap_socket(client, server_side=True) as secure,
        socket.create_connection(("127.0.0.1", port)) as upstream,
    ):
        other = {secure: upstream, upstream: secure}
        while True:
            for one in [secure] if secure.pending() else select.select([*other], [], [])[0]:
                data = one.recv(1 << 16)
                if not data:
                    return
                other[one].sendall(data)
