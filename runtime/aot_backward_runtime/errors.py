"""The runtime's exceptions. Every error is an :class:`AotBackwardError` and names the object, the expected and actual
value, and the next step."""


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


class AotBackwardError(Exception):
    """The common base of every error of this project. Its text is safe to print: names from a package, which may be any
    text, are escaped."""

    def __init__(self, *arguments: object):
        super().__init__(*(_printable(a) if isinstance(a, str) else a for a in arguments))


class PackageError(AotBackwardError):
    """The file is incomplete, altered, or of a format version that this reader does not know."""


class SignatureError(AotBackwardError):
    """The signature of a package, or the key, is not the one that you require, and nothing of the package was used; or
    signing failed."""


class IncompatibleError(AotBackwardError):
    """The package is intact, but was built for another torch, processor, device or system."""


class InputError(AotBackwardError, ValueError):
    """An argument of a call does not fit the exported program; nothing was run."""


class GradientError(AotBackwardError, RuntimeError):
    """The package cannot compute a requested gradient correctly."""


class WeightsError(AotBackwardError, ValueError):
    """Parameters or buffers do not fit the package; the old ones stay."""


class StateDictError(WeightsError, RuntimeError):
    """A ``state_dict`` does not fit a loaded module, and nothing was changed. It is also a RuntimeError, as
    ``nn.Module.load_state_dict`` raises."""


class ExecutionError(AotBackwardError, RuntimeError):
    """Native code failed although its arguments were valid, for example because memory ran out."""


class DistributedError(AotBackwardError, RuntimeError):
    """Processes that train together do not match, or one of them has ended. The gradients of this step are lost."""


class ExportError(AotBackwardError):
    """A program could not be exported correctly; no package was written.

    Attributes:
        operator: The name of the unsupported operator ("aten.index.Tensor"); empty if another reason is the cause.
    """

    operator: str = ""

    @classmethod
    def of(cls, operator: object, message: str) -> "ExportError":
        error = cls(message)
        error.operator = str(operator)
        return error


class MissError(AotBackwardError):
    """``replay(strict=True)``: the package does not hold this backward pass. Nothing of the pass was run."""


class StateError(AotBackwardError):
    """A training state could not be saved, and the old file stays; or the file to resume from is damaged or
    incomplete."""
