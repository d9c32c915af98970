"""Version of the interface that the alias offers."""

__version__ = "0.3.2"
