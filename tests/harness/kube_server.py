"""A small Kubernetes API server: objects in a dictionary, over real HTTP and websockets.

It stands in for the cluster, never for our code: the real client talks to it. Objects are stored as
they come (as a server-side apply of a whole object), lists filter by label, and `exec` runs
a real command.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from aiohttp import web

from tests.harness.ranks import TINY

BEARER = "a-bearer-token-of-the-kubeconfig"
_PATH = re.compile(
    r"(/api/v1|/apis/[^/]+/[^/]+)(?:/namespaces/(?P<ns>[^/]+))?/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?$"
)


def submit_of(folder: Path) -> list[str]:
    """Return the arguments of a submit that only the cluster can refuse."""
    file = folder / "words.yaml"
    values = {k: v for k, v in TINY.items() if k != "name"} | {
        "dataset": "stdlib",
        "workers": 2,
        "device": "cpu",
    }
    file.write_text(yaml.safe_dump(values))
    return ["submit", "--config", str(file)]


class ApiServer:
    """The server. A context manager; `objects` maps (plural, namespace, name) to what was applied."""

    def __init__(self, volume: Path | None = None, kuberay: bool = True) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.refusals: dict[str, tuple[int, str]] = {}  # "METHOD plural" -> status and message
        self.heads: dict[str, str] = {}  # cluster -> base URL of its head's port 8265
        self.drop_ray = 0  # so many calls of Ray by exec fail
        self.execs: list[str] = []  # the pod of each command
        self.exec_containers: list[str] = []  # and its container; empty for the pod's first one
        # A command's output ends after so many bytes, with the connection
        self.exec_limit: int | None = None
        self.volume, self.kuberay = volume, kuberay
        self.lock = threading.RLock()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> ApiServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def kubeconfig(self, folder: Path) -> Path:
        """Write a kubeconfig that leads here."""
        path = folder / "kubeconfig"
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}
        user = {"name": "u", "user": {"token": BEARER}}
        context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
        whole = {"apiVersion": "v1", "kind": "Config", "current-context": "x"}
        path.write_text(
            yaml.safe_dump(whole | {"clusters": [cluster], "users": [user], "contexts": [context]})
        )
        return path

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{tail:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)  # some answers never come
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.port = runner.addresses[0][1]
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {BEARER}":
            return _status(401, "Unauthorized")
        if match := re.match(r"/api/v1/namespaces/([^/]+)/pods/([^/]+)/exec$", request.path):
            return await self._exec(request, match[1], match[2])
        if request.path == "/apis/ray.io/v1":
            return (
                web.json_response({"resources": []})
                if self.kuberay
                else _status(404, "page not found")
            )
        match = _PATH.match(request.path)
        if not match or (match["plural"].startswith("ray") and not self.kuberay):
            return _status(404, "the server could not find the requested resource")
        refusal = self.refusals.get(f"{request.method} {match['plural']}")
        if refusal:
            return _status(*refusal)
        with self.lock:
            return self._objects(
                request, match, await request.text() if request.can_read_body else ""
            )

    def _objects(self, request: web.Request, match: re.Match[str], text: str) -> web.Response:
        key = (match["plural"], match["ns"] or "", match["name"] or "")
        if request.method == "PATCH":
            assert request.query["fieldManager"]
            assert request.headers["Content-Type"] == "application/apply-patch+yaml"
            thing = yaml.safe_load(text)
            if key[1] and ("namespaces", "", key[1]) not in self.objects:
                return _status(404, f'namespaces "{key[1]}" not found')
            known = self.objects.get(key, {})
            is_immutable = key[0] in ("resourceclaimtemplates", "jobs")
            if is_immutable and known and known["spec"] != thing["spec"]:
                return _status(422, f"{key[2]} is invalid: spec: field is immutable")
            self.objects[key] = thing | ({"status": known["status"]} if "status" in known else {})
            return web.json_response(self.objects[key])
        if request.method == "GET" and not key[2]:
            selector = request.query.get("labelSelector", "")
            items = [
                thing
                for (plural, space, _), thing in self.objects.items()
                if plural == key[0]
                and key[1] in ("", space)
                and _selects(selector, thing["metadata"].get("labels", {}))
            ]
            return web.json_response({"items": items})
        if key not in self.objects:
            return _status(404, f'{key[0]} "{key[2]}" not found')
        if request.method == "DELETE":
            return web.json_response(self.objects.pop(key))
        return web.json_response(self.objects[key])

    def _in_pod(
        self, namespace: str, pod: str, command: list[str]
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command and the environment that lead here to what they lead to in the pod."""
        with self.lock:
            thing = self.objects.get(("pods", namespace, pod), {"metadata": {}})
        cluster = thing["metadata"].get("labels", {}).get("ray.io/cluster", "")
        here = self.heads.get(cluster, "")
        environment = dict(os.environ)
        for container in thing.get("spec", {}).get("containers", ()):
            for variable in container.get("env", ()):
                reference = variable["valueFrom"]["secretKeyRef"]
                secret = self.objects["secrets", namespace, reference["name"]]["data"]
                value = base64.b64decode(secret[reference["key"]]).decode()
                environment[variable["name"]] = value
        words = []
        for word in command:
            word = word.replace("/data", str(self.volume))
            words.append(word.replace("http://localhost:8265", here) if here else word)
        if words[0] == "python":
            words[0] = sys.executable
        return words, environment

    async def _exec(self, request: web.Request, namespace: str, pod: str) -> web.StreamResponse:
        """Run the command with /data read as the volume, and the head's port 8265 as its address
        here, in the v4 channel protocol: 1 stdout, 2 stderr, 3 the end.
        """
        self.execs.append(pod)
        self.exec_containers.append(request.query.get("container", ""))
        asks_ray = any("localhost:8265" in word for word in request.query.getall("command"))
        if asks_ray and self.drop_ray:
            self.drop_ray -= 1
            return _status(502, "the stream was dropped")
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        words, environment = self._in_pod(namespace, pod, request.query.getall("command"))
        process = await asyncio.create_subprocess_exec(
            *words,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
        )
        assert process.stdout
        assert process.stderr
        sent = 0
        try:
            with suppress(ConnectionError):  # of a client that has gone
                while out := await process.stdout.read(30000):
                    await socket.send_bytes(b"\x01" + out[: self.exec_limit])
                    sent += len(out)
                    if self.exec_limit is not None and sent >= self.exec_limit:
                        await socket.close()
                        return socket
                await socket.send_bytes(b"\x02" + await process.stderr.read())
            await process.wait()
        finally:
            # It ends the process. Else that is left to the garbage collection, which complains of
            # the closed loop in the midst of another test.
            process._transport.close()  # type: ignore[attr-defined]
        causes = [{"reason": "ExitCode", "message": str(process.returncode)}]
        end: dict[str, Any] = {"status": "Success"}
        if process.returncode:
            end = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
        with suppress(ConnectionError):
            await socket.send_bytes(b"\x03" + json.dumps(end).encode())
            await socket.close()
        return socket


RAY_TOKEN = "x"


@contextmanager
def ray_head(server: ApiServer, *clusters: str) -> Iterator[dict[str, str]]:
    """Ray's jobs API, in the head pod of each of these clusters.

    Yields the log that it returns, by the job's id. A stop appears as "ID stopped". Only the token
    of the clusters' Secret opens it.
    """
    found: dict[str, str] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _, _, kind, *words = self.path.split("/")
            assert kind == "jobs"
            job, *rest = words
            if self.headers.get("Authorization") != f"Bearer {RAY_TOKEN}":
                self._answer(401, {"error": "Unauthorized"})
            elif rest == ["logs"]:
                self._answer(200, {"logs": found.get(job, "")})
            else:
                assert rest == ["stop"]
                found[f"{job} stopped"] = self.command
                self._answer(200, {"stopped": True})

        do_POST = do_GET

        def _answer(self, status: int, answer: Any) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Print nothing."""

    ray = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    # shutdown() waits for as long as it sleeps
    threading.Thread(target=ray.serve_forever, args=(0.02,), daemon=True).start()
    for cluster in clusters:
        server.heads[cluster] = f"http://127.0.0.1:{ray.server_port}"
        reference = {"secretKeyRef": {"name": "token", "key": "auth_token"}}
        env = [{"name": "RAY_AUTH_TOKEN", "valueFrom": reference}]
        labels = {"ray.io/cluster": cluster, "ray.io/node-type": "head"}
        server.objects["pods", "nanoray", f"{cluster}-head"] = {
            "metadata": {"name": f"{cluster}-head", "labels": labels},
            "spec": {"containers": [{"name": "ray-head", "env": env}]},
            "status": {"phase": "Running"},
        }
    token = base64.b64encode(RAY_TOKEN.encode()).decode()
    secret = {"metadata": {"name": "token"}, "data": {"auth_token": token}}
    server.objects["secrets", "nanoray", "token"] = secret
    try:
        yield found
    finally:
        ray.shutdown()
        ray.server_close()


def _selects(selector: str, labels: dict[str, str]) -> bool:
    """Whether `labels` satisfy a selector of the forms `a=b` and `a in (b,c)`, joined by commas."""
    for part in re.findall(r"[^,(]+(?:\([^)]*\))?", selector):
        key, values = re.split(r"=| in ", part.strip(), maxsplit=1)
        if labels.get(key) not in values.strip("()").split(","):
            return False
    return True


def _status(code: int, message: str) -> web.Response:
    return web.json_response(
        {"kind": "Status", "status": "Failure", "message": message, "code": code}, status=code
    )
