"""The schema of a package's ``manifest.json``, as frozen dataclasses. ``manifest_json.py`` reads and writes them.

``docs/format.md`` states the format in prose. Rules: a field without a default must be present and have its type. A
later 1.y may add fields: a reader ignores unknown fields of a version later than its own, unless ``required_features``
names a feature it does not know.

Changes (newest first):
    1.17 2026-11-29  ``EntrySpec.standalones``; targets for aarch64
    1.16 2026-11-28  ``Manifest.metadata`` and ``EntrySpec.metadata``; entries of kind "function"; names of outputs
    1.15 2026-11-28  the manifest ends with its own SHA-256; unknown fields are refused
    1.14 2026-11-27  ``EntrySpec.layers``; ``EntrySpec.source`` of 1.12 and ``Speed.choices`` of 1.9 are no longer
                     written, and ignored
    1.13 2026-11-25  ``EntrySpec.clippings`` of a replay entry
    1.12 2026-11-24  ``EntrySpec.source``: modules of a recorded script
    1.11 2026-11-24  ``EntrySpec.updates`` of a replay entry
    1.10 2026-11-24  ``EntrySpec.standalone``
    1.9  2026-11-23  ``Speed.choices`` of a recorded pass
    1.8  2026-11-23  ``PassSpec.speed``
    1.7  2026-11-23  ``VariantSpec.speed``
    1.6  2026-11-23  no change of the manifest: sketches and digests among the stored examples
    1.5  2026-11-22  ``Manifest.operators``: the modules that register operators missing from PyTorch
    1.4  2026-11-21  several targets: ``Manifest.targets``, ``Target.name``, ``LibrarySpec.builds``, ``verdicts``;
                     ``LibrarySpec.graph``
    1.3  2026-11-21  ``VariantSpec.double``, ``gives``, ``random``, ``unreached`` and ``set_apart``; ``Plan.consumes``
                     (feature "consumes")
    1.2  2026-11-21  entries of kind "step": ``EntrySpec.step``, ``VariantSpec.step`` and ``accumulate``;
                     ``WeightSpec.fill`` (feature "fill")
    1.1  2026-11-21  entries of kind "replay": ``EntrySpec.structures``
    1.0  2026-11-21  first version
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FORMAT_VERSION = (1, 17)
KNOWN_FEATURES = frozenset({"fill", "consumes"})
FOLDER = "extra/aot_backward"
MANIFEST_MEMBER = f"{FOLDER}/manifest.json"
WEIGHTS_MEMBER = f"{FOLDER}/weights.safetensors"
EXAMPLES_MEMBER = f"{FOLDER}/examples.safetensors"
GRAPH_FOLDER = f"{FOLDER}/graphs"
LARGEST_MANIFEST = 64 << 20  # bytes, by docs/format.md; bounds the memory for parsing
DEEPEST = 64  # nesting of trees and of JSON, by docs/format.md; bounds recursion

Size = int | str
"""A dimension or a stride in elements: a number, or an expression in the variant's symbols (see ``expressions.py``)."""


@dataclass(frozen=True)
class TensorSpec:
    """The metadata that a tensor must have. Error messages call the tensor ``name``: ``x``, ``batch['ids']``,
    ``output[0]``."""

    name: str
    dtype: str  # "float32": the name under torch.*
    device: str  # "cpu" or "cuda"; the caller chooses the index
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    requires_grad: bool = False


@dataclass(frozen=True)
class Tree:
    """A nested structure of arguments or results.

    ``kind`` is "tensor" (``index`` into the flat tensors), "constant" (``value``: None, bool, int, float or str),
    "size" (an ``expression``), "tuple", "list", "dict" (``keys``), "namedtuple" (``type_name`` and ``keys``), or
    "object" (another registered type: ``type_name`` and ``keys``). An object comes back as a dict unless the caller of
    ``load`` passes its class.
    """

    kind: str
    index: int = -1
    value: bool | int | float | str | None = None
    expression: str = ""
    type_name: str = ""
    keys: tuple[str | int, ...] = ()
    children: tuple[Tree, ...] = ()


@dataclass(frozen=True)
class SymbolSpec:
    """A dynamic dimension. Dimension ``dim`` of flat input ``input`` determines its value:
    ``size = scale * symbol + offset``.

    In a ``replay`` entry ``input`` may be -1: then ``size`` is the pass's size number ``dim``."""

    name: str  # in expressions: "s0"
    label: str  # the author's name for it: "batch"; else the same as ``name``
    input: int
    dim: int
    minimum: int
    maximum: int | None  # None: unbounded
    scale: int = 1
    offset: int = 0


@dataclass(frozen=True)
class Call:
    """One native call. ``operands`` names its inputs, in the library's order: ``input:I`` is a flat input, ``saved:I``
    the variant's I-th saved tensor, ``cotangent:I`` the variant's I-th incoming gradient. ``size:E`` is an empty tensor
    of shape ``(E, 0)`` that carries the size ``E`` (an expression) into the graph. Results come back in the library's
    order. A plan refers to them as ``result:I``."""

    library: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Gradient:
    """The source of one gradient: ``result:I`` of the call, or "" if the true gradient is None (the tensor is unused).

    ``of`` is ``parameter:NAME`` or ``input:I``. ``cotangents``: the incoming gradients that it depends on; if none of
    them is defined, it is None, as in eager."""

    of: str
    source: str
    cotangents: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The way one graph of a variant is run.

    ``outputs``: for each flat output tensor ``result:I``, ``input:I`` (the caller's own tensor comes back), or
    ``parameter:NAME``.
    ``saved``: for each saved tensor ``result:I`` or ``input:I``; only a training forward has any.
    ``watched``: ``input:I``, ``result:I`` or ``parameter:NAME`` whose memory a saved tensor shares; like the saved
    tensors, they may not be changed in place between forward and backward.
    ``reads``: parameters and buffers whose values the call reads. If the backward reads one that changed after the
    forward, that is an error. ``writes``: buffers that the call updates in place.
    ``gradients``: gradients of a backward, or of a ``grad`` entry.
    ``consumes``: saved tensors, by number, that the call overwrites; a caller that needs them again passes copies
    (feature "consumes").
    """

    call: Call | None
    outputs: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    gradients: tuple[Gradient, ...] = ()
    consumes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ambient:
    """Global state at capture that changes eager's results; every call must run under the same state."""

    autocast: str = ""  # dtype for the variant's device, or "" if autocast is off
    deterministic: bool = False
    matmul_precision: str = "highest"


@dataclass(frozen=True)
class Verdict:
    """The outcome of the self-check. ``status``: "verified", or "not run: reason"."""

    status: str
    worst: str = ""  # the tensor with the largest error
    error: float = 0.0  # its ‖artifact − truth‖ over the allowed error; at most 1 when verified
    sizes: tuple[str, ...] = ()  # the symbol values it was run with: "s0=4"


@dataclass(frozen=True)
class Timing:
    """The shortest time of one call with its backward or update, in microseconds at each of :attr:`Speed.sizes`,
    measured in the exporting process. ``saved``: bytes that the forward keeps for the backward at the example's sizes;
    -1 for eager."""

    # "eager", or the candidate: "default", "min_cut" (partitioners), "whole" (all in one graph); for a recorded pass
    # see PassSpec
    name: str
    microseconds: tuple[float, ...]
    saved: int = -1


@dataclass(frozen=True)
class Speed:
    """Times of a variant, measured at export: eager first, then each candidate, in turns in one process.

    ``chosen``: the candidate in the package. ``sizes``: text ("batch=16"), "" if nothing is dynamic. ``tune``: "quick";
    "full" in packages before format 1.15. ``target`` and ``torch``: the target and the torch version of the measured
    code; a rebuilt package has other code. ``others``: how many other threads ran or waited for a processor; on a busy
    machine fewer ``threads`` are used. ``slow``: in older packages, if the chosen code was slower than eager, texts that
    name its slowest parts."""

    chosen: str
    timings: tuple[Timing, ...]
    sizes: tuple[str, ...]
    threads: int
    processor: str
    tune: str
    target: str
    torch: str
    others: int
    slow: tuple[str, ...] = ()

    @property
    def ratios(self) -> tuple[float, ...]:
        """Return the package's time divided by eager's, at each of the sizes."""
        times = {t.name: t.microseconds for t in self.timings}
        return tuple(ours / max(eager, 1e-9) for ours, eager in zip(times[self.chosen], times["eager"], strict=True))

    @functools.cached_property
    def means(self) -> Mapping[str, float]:
        """Return the geometric means over the sizes, in microseconds, by name."""
        return {
            t.name: math.prod(max(m, 1e-9) ** (1 / len(t.microseconds)) for m in t.microseconds) for t in self.timings
        }


@dataclass(frozen=True)
class Shared:
    """An output that shares another output's memory. ``output`` and ``base`` are their numbers; it begins ``offset``
    elements after the start of the base.

    Its sizes are those of its :class:`TensorSpec`. So are its strides unless ``stride`` gives them: compiled code
    returns the output in separate memory, without gaps."""

    output: int
    base: int
    offset: Size
    stride: tuple[Size, ...] = ()


@dataclass(frozen=True)
class VariantSpec:
    """One program compiled under guards.

    ``forward``/``backward`` serve calls that need gradients, ``inference`` serves the others. A ``grad`` entry has only
    ``gradient``. A ``step`` entry has ``step``, the whole step, and, if gradients can be accumulated, ``accumulate``,
    which only adds them up.
    ``double``, of a module: the gradients as a program of the inputs, followed by the incoming gradients, so that they
    can be differentiated again. Its ``gives`` names the tensor that each output is the gradient of ("parameter:NAME",
    "input:I"). Its ``random`` is True if it draws random numbers; these must be the forward's.
    ``set_apart``: submodules that are not in ``mode``, such as a BatchNorm that stays in eval mode while the rest
    trains.
    ``verdict`` is that of the first target. ``verdicts``: those of the package's further targets, in order.
    ``shared``: outputs that share memory with another output. ``speed``: times measured at export, if any.
    ``unreached``, of a variant without a backward: tensors that required gradients at export ("parameter:NAME",
    "input:I") but do not affect any output.
    """

    mode: str  # "train", "eval", or "" if the program is a plain function
    in_tree: Tree  # of (args, kwargs)
    out_tree: Tree
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    cotangents: tuple[TensorSpec, ...]  # one per differentiable output
    differentiable: tuple[int, ...]  # the numbers of these outputs
    symbols: tuple[SymbolSpec, ...]
    guards: tuple[str, ...]
    ambient: Ambient
    verdict: Verdict
    forward: Plan | None = None
    backward: Plan | None = None
    inference: Plan | None = None
    gradient: Plan | None = None
    argument_names: tuple[str, ...] = ()  # names of the forward's positional parameters, so that x=… can be matched
    seed: int = 0  # passed to torch.manual_seed before each stored example was run
    step: Plan | None = None
    accumulate: Plan | None = None
    double: VariantSpec | None = None
    gives: tuple[str, ...] = ()
    random: bool = False
    unreached: tuple[str, ...] = ()
    set_apart: tuple[str, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    shared: tuple[Shared, ...] = ()
    speed: Speed | None = None

    @property
    def orders(self) -> tuple[VariantSpec, ...]:
        """Return this variant, its ``double``, the double of that, …"""
        return (self,) if self.double is None else (self, *self.double.orders)


@dataclass(frozen=True)
class Segment:
    """One step of a recorded pass: one operation of its tape, or a compiled graph that does several at once.

    ``ops``: the operations' numbers on the tape. ``library``: the compiled graph, or "" for a single operation.
    ``operands`` of a graph: ``input:I`` is a tensor of the pass, ``value:I`` an earlier value, ``size:E`` as in
    :class:`Call`. ``operands`` of a single ``accumulate``: ``("fresh",)`` if the gradient has separate memory and the
    layout of the leaf's gradient, so that it can become the leaf's ``.grad``. ``results``: the value that each result
    of the graph is; a value listed in ``undefined`` is None. ``absent``: earlier values that were undefined when the
    graph was compiled; if one is defined, the operations are run one by one.
    """

    ops: tuple[int, ...]
    library: str = ""
    operands: tuple[str, ...] = ()
    results: tuple[int, ...] = ()
    undefined: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()


@dataclass(frozen=True)
class PassSpec:
    """A recorded pass compiled under guards. ``sizes``: the required value of each of the pass's sizes, a number or an
    expression in the symbols. ``verdicts``: as in :class:`VariantSpec`.

    ``speed``: times of ``backward()`` in the recording process: eager and compiled. Up to format 1.13 also interpreted;
    then ``chosen`` may be another candidate, and the code is not run. The compiled time is the engine's part of an
    interpreted pass, plus the rest times the ratio compiled/interpreted on the recorded values; if the pass calls the
    script's code, plus the rest changed by their difference."""

    inputs: tuple[TensorSpec, ...]
    sizes: tuple[Size, ...]
    scalars: tuple[int | float, ...]
    symbols: tuple[SymbolSpec, ...]
    guards: tuple[str, ...]
    ambient: Ambient
    verdict: Verdict
    segments: tuple[Segment, ...]
    verdicts: tuple[Verdict, ...] = ()
    speed: Speed | None = None


@dataclass(frozen=True)
class StructureSpec:
    """Backward passes of one fingerprint (``tape.py``). ``nodes``: the autograd nodes' names. ``seconds``: time to run
    the tape uncompiled."""

    fingerprint: str
    nodes: tuple[str, ...]
    operations: int
    variants: tuple[PassSpec, ...]
    seconds: float = 0.0


@dataclass(frozen=True)
class StateSpec:
    """A parameter or buffer of an entry. Tied names have the same ``weight``."""

    name: str  # "layers.0.weight"
    weight: str  # key in the package's weights
    parameter: bool
    requires_grad: bool
    persistent: bool = True  # False: a buffer that state_dict() leaves out


@dataclass(frozen=True)
class Interval:
    """An interval of numbers. None as an end: unbounded. An ``open`` end is excluded."""

    low: float | None = None
    high: float | None = None
    low_open: bool = True
    high_open: bool = True


@dataclass(frozen=True)
class NumberSpec:
    """A number that a step's graphs read at run time, so that a learning-rate scheduler can change it:
    ``param_groups[group][key]``, or its element ``[position]`` if that is a list.

    Group -1 is the entry itself: "clip_norm", "clip_value", "loss_scale". ``allowed``: the values that the compiled
    code supports (``weight_decay`` cannot become 0 if it was not); empty: all. Its index in the vector of numbers is
    its index in this list plus 2. The first element of the vector is 1 if gradients are added to the accumulated ones
    (else they replace them); the second is 1 if the optimizer has no state yet (else 0)."""

    group: int
    key: str
    position: int
    value: float
    allowed: tuple[Interval, ...] = ()


@dataclass(frozen=True)
class GroupSpec:
    """A parameter group: the parameters' names in the module, and its other options as JSON."""

    parameters: tuple[str, ...]
    options: str


@dataclass(frozen=True)
class OptimizerStateSpec:
    """One tensor of the optimizer's state. ``state``: its name in the entry's ``state``. A tensor that counts steps may
    serve several parameters."""

    key: str  # "exp_avg"
    parameters: tuple[str, ...]
    state: str
    # Index in ``numbers`` of every element's value before the first step, even after a scheduler changed it
    starts_as: int = -1


@dataclass(frozen=True)
class GradientSlot:
    """The tensor that accumulates a parameter's gradient: its name in the entry's ``state``."""

    parameter: str
    state: str


@dataclass(frozen=True)
class StepSpec:
    """The optimizer of a ``step`` entry. Parameters and buffers of the module are called ``module.NAME`` in the entry's
    ``state``."""

    optimizer: str  # "torch.optim.adamw.AdamW"
    defaults: str  # JSON
    groups: tuple[GroupSpec, ...]
    numbers: tuple[NumberSpec, ...]
    state: tuple[OptimizerStateSpec, ...]
    gradients: tuple[GradientSlot, ...] = ()  # if gradients can be accumulated
    update: Plan | None = None  # the optimizer alone, on accumulated gradients
    fresh: bool = True  # the optimizer had made no step at export, so its ``state_dict`` had no state
    # The last result of ``step`` and ``update``, apart from ``finite``, is the norm of all gradients before clipping
    norm: bool = False
    finite: bool = False  # the very last result is True if all gradients were finite; otherwise nothing was changed
    in_place: bool = False  # a call that fails because memory ran out has changed nothing


@dataclass(frozen=True)
class StateSlot:
    """One tensor of a parameter's optimizer state, ``optimizer.state[parameter][key]``."""

    key: str
    parameter: str


@dataclass(frozen=True)
class UpdateSpec:
    """A step of the script's own optimizer, recorded with its backward passes: one library that writes parameters and
    state in place.

    Parameters are named by group and position, ``"0.3"`` for ``param_groups[0]["params"][3]``. The library takes the
    gradients of ``trained``, those parameters, the tensors of ``state``, and the vector of numbers, whose first two
    elements are 0 (see :class:`NumberSpec`). It returns one number, which is unused. ``groups``: their options that are
    not numbers are fixed. ``state``: the only state tensors of the parameters in ``trained``. ``speed``: times of the
    whole step in the recording process, by eager as the script had it ("foreach", "fused") and compiled."""

    optimizer: str  # "torch.optim.adamw.AdamW"
    groups: tuple[GroupSpec, ...]
    numbers: tuple[NumberSpec, ...]
    trained: tuple[str, ...]
    state: tuple[StateSlot, ...]
    library: str
    verdict: Verdict
    verdicts: tuple[Verdict, ...] = ()
    speed: Speed | None = None


@dataclass(frozen=True)
class ClippingSpec:
    """Calls of ``torch.nn.utils.clip_grad_norm_`` or ``clip_grad_value_`` of a recorded script: one library that writes
    gradients in place.

    It takes the gradients of the call's parameters, in order, and a vector of two float64 numbers: ``max_norm`` or
    ``clip_value``, and 1 if gradients whose norm is Inf or NaN stay unchanged, else 0. Its one result is the total
    norm; for ``clip_grad_value_`` it is unused. ``norm_type``: the float as Python writes it, ``"2.0"`` or ``"inf"``;
    "" for ``clip_grad_value_``. ``speed``: times of the whole call."""

    function: str  # "clip_grad_norm_" or "clip_grad_value_"
    norm_type: str
    library: str
    verdict: Verdict
    verdicts: tuple[Verdict, ...] = ()
    speed: Speed | None = None


@dataclass(frozen=True)
class LayerSpec:
    """A submodule of an exported module, or the module itself (name ""). ``attach`` compares it with a live one.

    ``settings``: attributes that are numbers, texts, dtypes, None, or lists and tuples of these, as Python writes them:
    {"p": "0.1"}; functions and classes by their names. ``source``: SHA-256 of the source of its class and that class's
    bases; "" for PyTorch's classes. ``hooks``: whether its calls run hooks. ``replaced``: whether its forward differs
    from that of its class."""

    name: str
    kind: str  # its class, "torch.nn.modules.dropout.Dropout"; "Net" for a class that is not PyTorch's
    settings: dict[str, str] = field(default_factory=dict)
    source: str = ""
    hooks: bool = False
    replaced: bool = False


@dataclass(frozen=True)
class EntrySpec:
    kind: str  # "module", "function", "grad", "replay" or "step"
    state: tuple[StateSpec, ...]
    variants: tuple[VariantSpec, ...]
    modules: tuple[str, ...] = ()  # every submodule's name, so that empty ones are rebuilt too
    training: bool = True  # the mode after loading
    wrt: tuple[str, ...] = ()  # of a grad entry: ``parameter:NAME`` or ``input:I``, in the order returned
    names: tuple[str, ...] = ()  # the key of each gradient in the result
    single: bool = False  # the gradient itself is returned, not a dict with one item
    has_aux: bool = False
    structures: tuple[StructureSpec, ...] = ()  # of a replay entry
    step: StepSpec | None = None  # of a step entry
    updates: tuple[UpdateSpec, ...] = ()  # of a replay entry
    clippings: tuple[ClippingSpec, ...] = ()  # of a replay entry
    layers: tuple[LayerSpec, ...] = ()  # of a module entry: itself and every submodule
    metadata: str = ""  # the author's JSON object, or ""
    # "verified": the C library reproduced the stored results without PyTorch; else the reason why not, or "" if
    # untested
    standalone: str = ""
    standalones: tuple[str, ...] = ()  # the same for the package's further targets; () if untested

    @property
    def json_metadata(self) -> dict[str, Any]:
        """Return the author's metadata; {} if there is none."""
        return dict(json.loads(self.metadata)) if self.metadata else {}

    @property
    def in_place(self) -> tuple[UpdateSpec | ClippingSpec, ...]:
        """Return the parts of a replay entry that write to tensors of the script."""
        return *self.updates, *self.clippings

    @property
    def program_state(self) -> list[StateSpec]:
        """Return the program's parameters and buffers without the additions of a training step: optimizer state,
        numbers, accumulated gradients."""
        added = (
            {"numbers", *(s.state for s in self.step.state), *(g.state for g in self.step.gradients)}
            if self.step
            else set()
        )
        return [s for s in self.state if s.name not in added]


@dataclass(frozen=True)
class WeightSpec:
    """A stored tensor: shape and strides in elements. The file holds it row-major; loading applies other strides.

    A weight with ``fill`` is not in the file: every element is that number."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    sha256: str  # of the row-major bytes
    fill: float | None = None


@dataclass(frozen=True)
class ConstantSpec:
    """A constant of a library that is bound to a weight by pointer. ``name`` is its name in the library."""

    name: str
    weight: str


@dataclass(frozen=True)
class BuildSpec:
    """A graph compiled for a further target. Fields as in :class:`LibrarySpec`."""

    member: str
    metadata: str
    extern: str
    constants: tuple[ConstantSpec, ...]
    needed: tuple[str, ...]
    glibc: str
    glibcxx: str
    operators: tuple[str, ...] = ()


@dataclass(frozen=True)
class LibrarySpec:
    """One compiled graph. ``member`` and the others are paths below the archive's top folder.

    ``builds``: the same graph compiled for each of ``Manifest.targets``. ``graph``: the member that holds the graph as
    data, or ""."""

    member: str
    metadata: str  # the adjacent *_metadata.json
    extern: str  # the adjacent JSON of operators that go through the proxy executor, or ""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    constants: tuple[ConstantSpec, ...]
    needed: tuple[str, ...]  # shared libraries that it is linked with (DT_NEEDED)
    glibc: str  # highest symbol version that it requires, "2.34"
    glibcxx: str
    nodes: int  # number of nodes in its graph
    operators: tuple[str, ...] = ()  # operators that go through the proxy executor
    builds: tuple[BuildSpec, ...] = ()
    graph: str = ""

    @property
    def every_build(self) -> tuple[LibrarySpec | BuildSpec, ...]:
        """Return this library, for the first target, and its builds for the further ones."""
        return (self, *self.builds)


@dataclass(frozen=True)
class Target:
    device: str  # "cpu" or "cuda"
    machine: str = "x86_64"
    march: str = ""
    cpu_flags: tuple[str, ...] = ()  # as /proc/cpuinfo writes them
    cuda_arch: str = ""  # "sm_90"
    cuda: str = ""  # version of CUDA
    name: str = ""  # "cpu:avx2", as in the target option

    @property
    def label(self) -> str:
        """Return the target's name, or its device if it has none."""
        return self.name or self.device

    @property
    def level(self) -> str:
        """Return the part of the name that tells targets of one device apart: "avx2"."""
        return self.name.partition(":")[2] or "default"


@dataclass(frozen=True)
class Member:
    size: int
    sha256: str


@dataclass(frozen=True)
class OperatorSpec:
    """The module and file that registered an operator in the exporting process.

    ``module``: the Python module; "__main__" for a script, which cannot be imported by name; "" if unknown. ``file``:
    the name of the registering file ("moe.py", "libmine.so"), for people; "" if unknown."""

    module: str = ""
    file: str = ""


@dataclass(frozen=True)
class Manifest:
    format_version: tuple[int, int]
    required_features: tuple[str, ...]
    producer: str  # "aot-backward 0.1.0"
    torch: str
    target: Target
    entries: dict[str, EntrySpec]
    libraries: dict[str, LibrarySpec]
    weights: dict[str, WeightSpec]
    members: dict[str, Member]  # every other member of the archive, by its path below the top folder
    has_weights: bool = True
    created: str = ""  # date, ISO 8601, UTC
    notes: dict[str, str] = field(default_factory=dict)  # for people; the runtime does not read them
    targets: tuple[Target, ...] = ()  # further targets; every library has a build for each
    # Operators that libraries call and PyTorch lacks, "mine::cube"
    operators: dict[str, OperatorSpec] = field(default_factory=dict)
    metadata: str = ""  # the author's JSON object, or ""
