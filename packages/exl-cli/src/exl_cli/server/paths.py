"""Paths with and without `/v1`: clients put it into their base URL, or leave it out.

The routes name each path once. `BothPaths` is ASGI middleware that maps the other spelling to it,
before keys are checked, so that both spellings have the same rules.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

_PREFIX = "/v1"


class BothPaths:
    """Serves each of `paths` under its other spelling too. A path that ends in a parameter stands
    for all paths that begin like it. The page at `/` has one path."""

    def __init__(self, app: ASGIApp, *, paths: Collection[str]) -> None:
        self.app = app
        self._paths = frozenset(path for path in paths if "{" not in path) - {"/"}
        self._heads = tuple(path.partition("{")[0] for path in paths if "{" in path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_known(scope["path"]):
            path: str = scope["path"]
            has_prefix = path.startswith(f"{_PREFIX}/")
            other = path.removeprefix(_PREFIX) if has_prefix else _PREFIX + path
            if self._is_known(other):
                scope = {**scope, "path": other}
        await self.app(scope, receive, send)

    def _is_known(self, path: str) -> bool:
        return path in self._paths or path.startswith(self._heads)
