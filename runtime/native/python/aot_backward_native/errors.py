"""Errors of packages, with the names of aot_backward_runtime's errors. Each message names the object, the expected and
the actual value."""


class AotBackwardError(Exception):
    """Base class of all errors."""


class PackageError(AotBackwardError):
    """The file is incomplete, altered, or of an unsupported format version; or the package has no such entry."""


class SignatureError(AotBackwardError):
    """The package is not signed by the requested key. Nothing of the package was used."""


class IncompatibleError(AotBackwardError):
    """The package is valid but was built for another processor, glibc, torch or backend."""


class InputError(AotBackwardError, ValueError):
    """An argument does not match the exported entry. No code was run."""


class ExecutionError(AotBackwardError, RuntimeError):
    """Native code failed although its arguments were valid."""


class StateError(AotBackwardError):
    """Saving failed and the old file was kept, or the file to resume from does not match and nothing has changed."""


class OutOfMemoryError(AotBackwardError, MemoryError):
    """Not enough memory for the call."""


OF_STATUS = [
    AotBackwardError, PackageError, PackageError, IncompatibleError, SignatureError, PackageError, InputError, StateError, ExecutionError,
    OutOfMemoryError,
]  # fmt: skip
"""Error classes, indexed by ``aotb_status`` of ``aot_backward.h``."""
