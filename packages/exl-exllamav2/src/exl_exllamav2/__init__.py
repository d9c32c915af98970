"""Runs programs written for exllamav2 on exl. `install` makes `import exllamav2` find exl."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exl_exllamav2.activation import install as install
    from exl_exllamav2.activation import load_ipython_extension as load_ipython_extension

    __version__: str
else:

    def __getattr__(name: str) -> Any:
        """Imports a function, or reads the version of the distribution, at its first use."""
        if name in ("install", "load_ipython_extension"):
            from exl_exllamav2 import activation

            return getattr(activation, name)
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import version

        return version("exl-exllamav2")
