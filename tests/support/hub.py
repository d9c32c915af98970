"""A hub on this machine: the HTTP routes that the hub's client uses to find and fetch models.

Large files are answered as the real hub does: a redirect to another route, with the hash of the
contents as ETag. `drop_after` cuts connections, and `damage` changes contents on their way.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

LARGE_BYTES = 4096


@dataclass(frozen=True)
class Stored:
    """One file of a repository."""

    data: bytes

    @property
    def is_large(self) -> bool:
        return len(self.data) >= LARGE_BYTES

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def git_hash(self) -> str:
        head = f"blob {len(self.data)}\0".encode()
        return hashlib.sha1(head + self.data, usedforsecurity=False).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_large else self.git_hash

    def described(self, name: str) -> dict[str, Any]:
        """The file in `model_info`, and with `path` for `rfilename` in the listing of a tree."""
        lfs = {
            "sha256": self.sha256,
            "oid": self.sha256,
            "size": len(self.data),
            "pointerSize": 134,
        }
        entry = {"rfilename": name, "size": len(self.data), "blobId": self.git_hash}
        return {**entry, "lfs": lfs} if self.is_large else entry


@dataclass
class Hub:
    """Repositories by name, then branch, then file. `requests` are the requests so far."""

    url: str = ""
    repos: dict[str, dict[str, dict[str, Stored]]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    drop_after: int | None = None
    """Close the connection after this many bytes of a large file, once per drop in `drops`."""
    drops: int = 0
    damage: bool = False
    requests: list[str] = field(default_factory=list)

    def add(self, repo: str, files: Mapping[str, bytes], branch: str = "main") -> None:
        stored = {name: Stored(data) for name, data in files.items()}
        self.repos.setdefault(repo, {"main": {}})[branch] = stored

    def commit(self, repo: str, branch: str) -> str:
        """Commit of a branch: it changes with the contents."""
        files = self.repos[repo][branch]
        listing = repr([(name, files[name].etag) for name in sorted(files)]) + branch
        return hashlib.sha1(listing.encode(), usedforsecurity=False).hexdigest()

    def branch(self, repo: str, revision: str) -> str | None:
        """The branch that a revision, a branch or a commit, means."""
        for name in self.repos[repo]:
            if revision in (name, self.commit(repo, name)):
                return name
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each answer waits for a delayed acknowledgement
    hub: Hub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        wanted = self.headers.get("Range", "")
        self.hub.requests.append(f"{self.command} {path} {wanted}".strip())
        if path == "/api/models":
            names = [{"id": name, "_id": name} for name in self.hub.repos]
            return self._send(200, json.dumps(names).encode())
        if match := re.fullmatch(r"/cdn/(\w+)", path):
            return self._contents(self._blob(match[1]))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/.*)?", path):
            return self._api(match[1], match[2] or "/revision/main")
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(*match.groups())
        return self._missing("EntryNotFound")

    def _api(self, repo: str, rest: str) -> None:
        if repo not in self.hub.repos:
            return self._missing("RepoNotFound")
        if rest == "/refs":
            branches = [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": "0" * 40}
                for name in self.hub.repos[repo]
            ]
            return self._json({"branches": branches, "tags": [], "converts": []})
        kind, _, revision = rest.strip("/").partition("/")
        branch = self.hub.branch(repo, revision)
        if branch is None:
            return self._missing("RevisionNotFound")
        if repo in self.hub.gated and kind == "tree":
            return self._missing("GatedRepo", status=403)
        files = [one.described(name) for name, one in self.hub.repos[repo][branch].items()]
        if kind == "tree":
            return self._json(
                [
                    {**one, "type": "file", "oid": one["blobId"], "path": one["rfilename"]}
                    for one in files
                ]
            )
        commit = self.hub.commit(repo, branch)
        return self._json({"id": repo, "_id": "1", "sha": commit, "siblings": files, "tags": []})

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        if repo not in self.hub.repos:
            return self._missing("RepoNotFound")
        if repo in self.hub.gated:
            return self._missing("GatedRepo", status=403)
        branch = self.hub.branch(repo, revision)
        if branch is None:
            return self._missing("RevisionNotFound")
        stored = self.hub.repos[repo][branch].get(name)
        if stored is None:
            return self._missing("EntryNotFound")
        commit = {"X-Repo-Commit": self.hub.commit(repo, branch)}
        if not stored.is_large:
            return self._contents(stored, commit)
        linked = {"X-Linked-Etag": f'"{stored.etag}"', "X-Linked-Size": str(len(stored.data))}
        # Another host name: the client follows redirects within the hub's own host only.
        elsewhere = self.hub.url.replace("127.0.0.1", "localhost")
        place = {"Location": f"{elsewhere}/cdn/{stored.etag}"}
        return self._send(302, b"", {**commit, **linked, **place})

    def _blob(self, etag: str) -> Stored:
        for branches in self.hub.repos.values():
            for files in branches.values():
                for stored in files.values():
                    if stored.etag == etag:
                        return stored
        raise KeyError(etag)

    def _contents(self, stored: Stored, headers: Mapping[str, str] | None = None) -> None:
        data = stored.data
        if self.hub.damage and stored.is_large:
            data = data[:-1] + bytes([data[-1] ^ 1])
        status, extra = 200, {"ETag": f'"{stored.etag}"', "Accept-Ranges": "bytes"}
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(match[1])
            status = 206
            extra["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data = data[start:]
        self._send(status, data, {**extra, **(headers or {})}, is_large=stored.is_large)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _missing(self, code: str, status: int = 404) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(
        self,
        status: int,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        is_large: bool = False,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if is_large and self.hub.drops and self.hub.drop_after is not None:
            self.hub.drops -= 1
            self.wfile.write(data[: self.hub.drop_after])
            self.close_connection = True
            return
        self.wfile.write(data)


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """A hub that answers at `hub.url` until the block ends."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def hub_of_this_process(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that `huggingface_hub` uses in this process, with an empty cache of its own."""
    from huggingface_hub import constants

    with serving_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield hub
