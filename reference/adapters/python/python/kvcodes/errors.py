"""The exceptions of the package."""


class Error(Exception):
    """Base of all errors of the package. ``code`` is the number of the error in its crate, or 0."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class ArgumentError(Error, ValueError):
    """A shape, length, number or setting does not fit."""


class ElementError(Error, TypeError):
    """Elements of another type, or memory that cannot be read or written in place."""


class FormatError(Error, ValueError):
    """Bytes are damaged, of another version, or belong to something else."""


class StoreError(Error, OSError):
    """A store does not answer, refuses, or holds damaged objects."""


class UnsupportedError(Error, NotImplementedError):
    """A model, cache operation or mask that the package does not support."""
