"""`GET /`: the chat page, one file that is built from the sources in `packages/exl-cli/page`."""

from __future__ import annotations

import gzip
import re
from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files

from fastapi import FastAPI, Request, Response

_INLINE = re.compile(r"<(script|style)\b[^>]*>(.*?)</\1>", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Page:
    """The page as it is sent. `packed`: the same bytes, compressed by gzip."""

    plain: bytes
    packed: bytes
    headers: dict[str, str]


def add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        found = _page()
        if request.headers.get("if-none-match") == found.headers["ETag"]:
            return Response(status_code=304, headers=found.headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers = {**found.headers, "Content-Encoding": "gzip"}
            return Response(found.packed, headers=headers, media_type="text/html")
        return Response(found.plain, headers=found.headers, media_type="text/html")


@cache
def _page() -> _Page:
    html = (files("exl_cli.server") / "page.html").read_text(encoding="utf-8")
    plain = html.encode()
    headers = {
        "Content-Security-Policy": content_policy(html),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "ETag": f'"{sha256(plain).hexdigest()[:32]}"',
        "Vary": "Accept-Encoding",
    }
    return _Page(plain, gzip.compress(plain, mtime=0), headers)


def content_policy(html: str) -> str:
    """Content-Security-Policy of the page. It allows the page's own scripts and styles, by their
    hashes, fonts within the page, and requests to this server."""
    allowed: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(html):
        digest = b64encode(sha256(text.encode()).digest()).decode()
        allowed[kind.lower()].append(f"'sha256-{digest}'")
    sources = {kind: " ".join(hashes) or "'none'" for kind, hashes in allowed.items()}
    return (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; "
        "img-src data:; font-src data:; connect-src 'self'; form-action 'none'; "
        "frame-ancestors 'none'; base-uri 'none'"
    )
