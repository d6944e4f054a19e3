"""The version, in one place; pyproject.toml has the same, and a test holds them together."""

__version__ = "0.2.0"
