"""What the runtime raises. Every error is an :class:`AotBackwardError` and names the thing, what came, what was expected, the next step."""


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


class AotBackwardError(Exception):
    """The common base of every error of this project. Its words can be printed anywhere: a package's names, which may be any text, stand escaped."""

    def __init__(self, *arguments: object):
        super().__init__(*(_printable(a) if isinstance(a, str) else a for a in arguments))


class PackageError(AotBackwardError):
    """The file is not a whole, unaltered package of a format version that this reader knows."""


class SignatureError(AotBackwardError):
    """The signature of a package, or the key, is not what whoever loads it asked for, and nothing of the package was used; or none could be made."""


class IncompatibleError(AotBackwardError):
    """The package is sound, but was built for another torch, processor, device or system."""


class InputError(AotBackwardError, ValueError):
    """An argument of a call does not fit what was exported; nothing was run."""


class GradientError(AotBackwardError, RuntimeError):
    """A gradient was asked for that the package cannot give rightly."""


class WeightsError(AotBackwardError, ValueError):
    """Parameters or buffers do not fit the package; the old ones stay."""


class StateDictError(WeightsError, RuntimeError):
    """A ``state_dict`` does not fit a loaded module, and nothing was changed; a RuntimeError too, as ``nn.Module.load_state_dict`` raises."""


class ExecutionError(AotBackwardError, RuntimeError):
    """Native code failed after its arguments had been found good, as when memory runs out."""


class DistributedError(AotBackwardError, RuntimeError):
    """Processes that train together do not fit each other, or one of them has ended. The gradients of this step are lost."""


class ExportError(AotBackwardError):
    """A program could not be exported rightly; no package was written.

    ``operator``: which one stands in the way ("aten.index.Tensor"), where it is one, and known."""

    operator: str = ""

    @classmethod
    def of(cls, operator: object, message: str) -> "ExportError":
        error = cls(message)
        error.operator = str(operator)
        return error


class MissError(AotBackwardError):
    """``replay(strict=True)``: a backward pass that the package does not hold. Nothing of it was run."""


class StateError(AotBackwardError):
    """A training state could not be saved, and the old file stays; or the file to resume from is not a whole, unaltered one."""
