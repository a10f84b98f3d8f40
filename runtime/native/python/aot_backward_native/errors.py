"""What a package can go wrong with. The names are those of aot_backward_runtime's errors: each names the thing, what came, what was expected."""


class AotBackwardError(Exception):
    """The common base."""


class PackageError(AotBackwardError):
    """The file is not a whole, unaltered package of a format version that this reader knows, or has no such entry."""


class SignatureError(AotBackwardError):
    """The signature of a package is not by the key that was asked for, and nothing of the package was used."""


class IncompatibleError(AotBackwardError):
    """The package is sound, but was built for another processor, glibc, torch or backend."""


class InputError(AotBackwardError, ValueError):
    """An argument of a call does not fit what was exported; nothing was run."""


class ExecutionError(AotBackwardError, RuntimeError):
    """Native code failed after its arguments had been found good."""


class StateError(AotBackwardError):
    """A training state could not be saved, and the old file stays; or the file to resume from does not fit, and nothing has changed."""


class OutOfMemoryError(AotBackwardError, MemoryError):
    """There is no memory for what was asked for."""


OF_STATUS = [
    AotBackwardError, PackageError, PackageError, IncompatibleError, SignatureError, PackageError, InputError, StateError, ExecutionError,
    OutOfMemoryError,
]  # fmt: skip
"""By the number of ``aotb_status`` in ``aot_backward.h``."""
