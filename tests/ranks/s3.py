"""A server that speaks S3 (moto's) for tests, and a proxy before it that is slow or breaks off."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.harness.ports import free_port

KEY = "AKIAWXYZ12345678TEST"
SECRET = "hunter2/do+not+store+this+secret"
TOKEN = "session-token-not-to-be-stored"
BUCKET = "runs-bucket"


class S3Server:
    """moto's server as a process of its own; what it has is gone when it is killed."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server with an empty bucket."""
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        deadline = time.monotonic() + 60
        while True:
            with suppress(OSError):
                request = urllib.request.Request(f"{self.url}/{BUCKET}", method="PUT")
                urllib.request.urlopen(request, timeout=5).close()
                return
            assert self._process.poll() is None, "moto's server has ended"
            assert time.monotonic() < deadline, "moto's server does not answer"
            time.sleep(0.1)

    def keys_with(self, *rights: list[str]) -> list[dict[str, str]]:
        """Return the variables of a key with each list of rights, and check rights from now on."""
        import boto3  # moto needs it

        given = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET}
        iam = boto3.client("iam", endpoint_url=self.url, region_name="us-east-1", **given)
        keys = []
        for number, actions in enumerate(rights):
            user = f"user{number}"
            statement = {"Effect": "Allow", "Action": actions, "Resource": "*"}
            policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
            iam.create_user(UserName=user)
            iam.put_user_policy(UserName=user, PolicyName="rights", PolicyDocument=policy)
            key = iam.create_access_key(UserName=user)["AccessKey"]
            keys.append(
                {
                    "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
                    "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
                    "AWS_ENDPOINT_URL": self.url,
                    "AWS_DEFAULT_REGION": "us-east-1",
                }
            )
        request = urllib.request.Request(
            f"{self.url}/moto-api/reset-auth",
            data=b"0",  # requests that are not checked
            headers={"Content-Type": "text/plain"},
            method="POST",
        )
        urllib.request.urlopen(request, timeout=5).close()
        return keys

    def kill(self) -> None:
        """End the server with SIGKILL."""
        assert self._process
        self._process.kill()
        self._process.wait()


class Proxy:
    """A TCP proxy before a server: it counts, slows down, and can refuse."""

    def __init__(self, server: S3Server) -> None:
        self.bytes_per_s = float("inf")
        self.received = 0  # bytes for the server
        self.refuses = False
        self._server = server
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def cut(self) -> None:
        """Close all connections, and refuse new ones."""
        self.refuses = True
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                if self.refuses:
                    client.close()
                    continue
                try:
                    server = socket.create_connection(("127.0.0.1", self._server.port))
                except OSError:
                    client.close()
                    continue
                self._open += [client, server]
                for source, target in ((client, server), (server, client)):
                    forward = threading.Thread(
                        target=self._forward, args=(source, target, source is client), daemon=True
                    )
                    forward.start()

    def _forward(self, source: socket.socket, target: socket.socket, is_upload: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 14):
                if is_upload:
                    self.received += len(data)
                    time.sleep(len(data) / self.bytes_per_s)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def proxy_before(server: S3Server) -> Iterator[Proxy]:
    proxy = Proxy(server)
    try:
        yield proxy
    finally:
        proxy.close()


def variables(endpoint: str) -> dict[str, str]:
    """Return the credentials and the address of the server, as a user's shell has them."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": TOKEN,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def shell(endpoint: str) -> dict[str, str]:
    """Return this process's environment with the credentials."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return kept | variables(endpoint)


def secrets_in(folder: Path) -> list[str]:
    """Return the files below a folder that contain a part of the credentials."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            if any(secret.encode() in data for secret in (KEY, SECRET, TOKEN)):
                found.append(str(path))
    return found


def records_of(folder: Path) -> list[dict[str, Any]]:
    """Return metrics.jsonl of a run's folder."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
