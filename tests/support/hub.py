"""A stand-in for the Hugging Face hub: the requests by which huggingface_hub reads a repository."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

COMMIT = "a" * 40


@dataclass
class Hub:
    """A hub with one model.

    Attributes:
        name: of the model.
        folder: its files.
        commit: of the branch ``main``, and of the tag ``v1``.
        status: of every answer about the model, where it is not 200; with the code that names it.
        taken: files whose content was read.
    """

    name: str
    folder: Path
    commit: str = COMMIT
    status: tuple[int, str] | None = None
    taken: list[str] = field(default_factory=list)
    address: str = ""

    def files(self) -> dict[str, bytes]:
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in paths}


@contextmanager
def serve_hub(hub: Hub) -> Iterator[Hub]:
    """Serve it on this machine until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            path = unquote(self.path.partition("?")[0])
            refs = (hub.commit, "main", "v1")
            api = f"/api/models/{hub.name}"
            if hub.status is not None:
                return self._send(b"{}", body, hub.status[0], {"X-Error-Code": hub.status[1]})
            if path == api or path in [f"{api}/revision/{ref}" for ref in refs]:
                siblings = [{"rfilename": name} for name in hub.files()]
                info = {"id": hub.name, "sha": hub.commit, "siblings": siblings}
                return self._send(json.dumps(info).encode(), body)
            if path in [f"{api}/tree/{ref}" for ref in refs]:
                entries = [
                    {"type": "file", "path": name, "size": len(data), "oid": _digest(data)}
                    for name, data in hub.files().items()
                ]
                return self._send(json.dumps(entries).encode(), body)
            for ref in refs:
                name = path.removeprefix(f"/{hub.name}/resolve/{ref}/")
                if name != path and name in hub.files():
                    if body:
                        hub.taken.append(name)
                    data = hub.files()[name]
                    more = {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": hub.commit}
                    return self._send(data, body, 200, more)
            known = path.startswith((api, f"/{hub.name}/"))
            code = "RevisionNotFound" if known else "RepoNotFound"
            return self._send(b"{}", body, 404, {"X-Error-Code": code})

        def _send(
            self, data: bytes, body: bool, status: int = 200, more: dict[str, str] | None = None
        ) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **(more or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
