"""The schema of a package's ``manifest.json``, as frozen dataclasses. ``manifest_json.py`` reads and writes them.

``docs/format.md`` states the format in prose. Rules: a field without a default must be there and have its type. A later 1.y may add fields:
a reader ignores unknown fields of a version later than its own, unless ``required_features`` names a feature it does not know.

Changes (newest first):
    1.15 2026-11-28  the manifest ends with its own SHA-256; unknown fields are refused
    1.14 2026-11-27  ``EntrySpec.layers``; ``EntrySpec.source`` of 1.12 and ``Speed.choices`` of 1.9 are no longer written, and ignored
    1.13 2026-11-25  ``EntrySpec.clippings`` of a replay entry
    1.12 2026-11-24  ``EntrySpec.source``: modules of a recorded script
    1.11 2026-11-24  ``EntrySpec.updates`` of a replay entry
    1.10 2026-11-24  ``EntrySpec.standalone``
    1.9  2026-11-23  ``Speed.choices`` of a recorded pass
    1.8  2026-11-23  ``PassSpec.speed``
    1.7  2026-11-23  ``VariantSpec.speed``
    1.6  2026-11-23  nothing here: sketches and digests among the stored examples
    1.5  2026-11-22  ``Manifest.operators``: what registers the operators that PyTorch itself does not have
    1.4  2026-11-21  several targets: ``Manifest.targets``, ``Target.name``, ``LibrarySpec.builds``, ``verdicts``; ``LibrarySpec.graph``
    1.3  2026-11-21  ``VariantSpec.double``, ``gives``, ``random``, ``unreached`` and ``set_apart``; ``Plan.consumes`` (feature "consumes")
    1.2  2026-11-21  entries of kind "step": ``EntrySpec.step``, ``VariantSpec.step`` and ``accumulate``; ``WeightSpec.fill`` (feature "fill")
    1.1  2026-11-21  entries of kind "replay": ``EntrySpec.structures``
    1.0  2026-11-21  first version
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

FORMAT_VERSION = (1, 15)
KNOWN_FEATURES = frozenset({"fill", "consumes"})
FOLDER = "extra/aot_backward"
MANIFEST_MEMBER = f"{FOLDER}/manifest.json"
WEIGHTS_MEMBER = f"{FOLDER}/weights.safetensors"
EXAMPLES_MEMBER = f"{FOLDER}/examples.safetensors"
GRAPH_FOLDER = f"{FOLDER}/graphs"
LARGEST_MANIFEST = 64 << 20  # bytes
DEEPEST = 64  # nesting of trees and of JSON

Size = int | str
"""A dimension or a stride in elements: a number, or an expression in the variant's symbols (see ``expressions.py``)."""


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor must look like. ``name`` is what error messages call it: ``x``, ``batch['ids']``, ``output[0]``."""

    name: str
    dtype: str  # "float32": the name under torch.*
    device: str  # "cpu" or "cuda"; the index is the caller's
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    requires_grad: bool = False


@dataclass(frozen=True)
class Tree:
    """A nested structure of arguments or results.

    ``kind`` is "tensor" (``index`` into the flat tensors), "constant" (``value``: None, bool, int, float or str), "size" (an ``expression``),
    "tuple", "list", "dict" (``keys``), "namedtuple" (``type_name`` and ``keys``), or "object" (another registered type: ``type_name``
    and ``keys``; comes back as a dict unless the caller of ``load`` hands the class).
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
    """A dynamic dimension. Its value is read off dimension ``dim`` of flat input ``input``: ``size = scale * symbol + offset``.

    In a ``replay`` entry ``input`` may be -1: then it is the pass's size number ``dim``."""

    name: str  # in expressions: "s0"
    label: str  # what the author called it: "batch"; else as ``name``
    input: int
    dim: int
    minimum: int
    maximum: int | None  # None: unbounded
    scale: int = 1
    offset: int = 0


@dataclass(frozen=True)
class Call:
    """One native call. ``operands`` names what is passed, in the library's order of inputs:
    ``input:I`` a flat input, ``saved:I`` the variant's I-th saved tensor, ``cotangent:I`` the I-th of the variant's incoming gradients,
    ``size:E`` an empty tensor of shape ``(E, 0)`` that carries the size ``E`` (an expression) into the graph.
    Results come back in the library's order and a plan refers to them as ``result:I``."""

    library: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Gradient:
    """Where one gradient comes from: ``result:I`` of the call, or "" where the true gradient is None (the tensor is unused).

    ``of`` is ``parameter:NAME`` or ``input:I``. ``cotangents``: the incoming gradients that it depends on; where none of them is defined,
    it is None, as in eager."""

    of: str
    source: str
    cotangents: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """How one graph of a variant is run.

    ``outputs``: for each flat output tensor ``result:I``, ``input:I`` (the caller's own tensor comes back), or ``parameter:NAME``.
    ``saved``: for each saved tensor ``result:I`` or ``input:I``; only a training forward has any.
    ``watched``: ``input:I``, ``result:I`` or ``parameter:NAME`` whose memory a saved tensor shares; like the saved tensors, they may not be
    changed in place between forward and backward.
    ``reads``: parameters and buffers whose values the call reads; a change of what the backward reads, after the forward, is an error.
    ``writes``: buffers that the call updates in place.
    ``gradients``: of a backward, or of a ``grad`` entry.
    ``consumes``: saved tensors, by number, that the call leaves with other values; a caller that needs them once more passes copies. (The feature
    "consumes".)
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
    """Global state at capture that changes what eager would compute; a call must come under the same."""

    autocast: str = ""  # dtype for the variant's device, or "" where autocast is off
    deterministic: bool = False
    matmul_precision: str = "highest"


@dataclass(frozen=True)
class Verdict:
    """The outcome of the self-check. ``status``: "verified", or "not run: reason"."""

    status: str
    worst: str = ""  # the tensor with the largest error
    error: float = 0.0  # its ‖artifact − truth‖ over what was allowed; at most 1 when verified
    sizes: tuple[str, ...] = ()  # the symbol values it was run at: "s0=4"


@dataclass(frozen=True)
class Timing:
    """How long one call took, with its backward or update, in the process that exported: the shortest in microseconds, at each of
    :attr:`Speed.sizes`.
    ``saved``: bytes that the forward keeps for the backward at the example's sizes; -1 for eager."""

    name: str  # "eager", or the candidate: "default", "min_cut" (partitioners), "whole" (all in one graph); of a recorded pass see PassSpec
    microseconds: tuple[float, ...]
    saved: int = -1


@dataclass(frozen=True)
class Speed:
    """What was measured of a variant when it was exported: eager first, then each candidate, in turns in one process. ``chosen``: the candidate whose
    code is in the package. ``sizes``: in words ("batch=16"), "" where nothing is dynamic. ``tune``: "quick"; "full" in packages before format 1.15.
    ``target`` and ``torch``: what the measured code was compiled for, and by; a package that was rebuilt has other code. ``others``: how many
    threads that were not the exporter's were running or waiting for a processor; on a busy machine fewer ``threads`` are used. ``slow``: where the
    chosen code was slower than eager, what took longest in it, in words."""

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
        """The time of the code in the package over eager's, at each of the sizes."""
        times = {t.name: t.microseconds for t in self.timings}
        return tuple(ours / max(eager, 1e-9) for ours, eager in zip(times[self.chosen], times["eager"], strict=True))

    @functools.cached_property
    def means(self) -> Mapping[str, float]:
        """Microseconds, by name: the geometric mean over the sizes."""
        return {t.name: math.prod(max(m, 1e-9) ** (1 / len(t.microseconds)) for m in t.microseconds) for t in self.timings}


@dataclass(frozen=True)
class Shared:
    """An output that lies in another's memory. ``output`` and ``base`` are their numbers, ``offset`` how many elements behind the base's first it
    begins; its sizes are those of its :class:`TensorSpec`, and so are its strides, unless ``stride`` gives them: compiled code returns it in memory
    of its own, where gaps are left out."""

    output: int
    base: int
    offset: Size
    stride: tuple[Size, ...] = ()


@dataclass(frozen=True)
class VariantSpec:
    """One program compiled under guards.

    ``forward``/``backward`` serve calls that need gradients, ``inference`` calls that need none; a ``grad`` entry has only ``gradient``; a
    ``step`` entry has ``step``, the whole, and, where gradients can be accumulated, ``accumulate``, which only adds them up.
    ``double``, of a module's: the gradients as a program of the inputs and, behind them, the incoming gradients, so that they can be differentiated
    again. There ``gives`` says what each output is the gradient of ("parameter:NAME", "input:I"), and ``random`` whether random numbers are
    drawn, which must be the forward's own.
    ``set_apart``: submodules that are not in ``mode``, as a BatchNorm that stays in eval mode while the rest trains.
    ``verdicts``: of the package's further targets, in their order; ``verdict`` is of the first.
    ``shared``: outputs that lie in the memory of another one. ``speed``: what was measured when it was exported, if anything.
    ``unreached``, of one without a backward: what required a gradient when it was exported ("parameter:NAME", "input:I"), and no output depends on.
    """

    mode: str  # "train", "eval", or "" where the program is a plain function
    in_tree: Tree  # of (args, kwargs)
    out_tree: Tree
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    cotangents: tuple[TensorSpec, ...]  # one per differentiable output
    differentiable: tuple[int, ...]  # which outputs those are
    symbols: tuple[SymbolSpec, ...]
    guards: tuple[str, ...]
    ambient: Ambient
    verdict: Verdict
    forward: Plan | None = None
    backward: Plan | None = None
    inference: Plan | None = None
    gradient: Plan | None = None
    argument_names: tuple[str, ...] = ()  # of the forward's positional parameters, so that x=… finds its place
    seed: int = 0  # of torch.manual_seed before each stored example was run
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
        """This one, its ``double``, the double of that, …"""
        return (self,) if self.double is None else (self, *self.double.orders)


@dataclass(frozen=True)
class Segment:
    """One step of a recorded pass: either one operation of its tape, run as it stands, or a compiled graph that does several at once.

    ``ops``: the operations' numbers on the tape. ``library``: the compiled graph, or "" for a single operation. ``operands``, of a graph:
    ``input:I`` a tensor of the pass, ``value:I`` an earlier value, ``size:E`` as in :class:`Call`; of a single ``accumulate``:
    ``("fresh",)`` where the gradient is memory of its own that lies as the leaf's gradient should, so that it can become the leaf's ``.grad``.
    ``results``: the value that each result of the graph is; a value listed in ``undefined`` is None. ``absent``: earlier values that the
    graph was made without, because they were undefined: where one is not, the operations are run one by one.
    """

    ops: tuple[int, ...]
    library: str = ""
    operands: tuple[str, ...] = ()
    results: tuple[int, ...] = ()
    undefined: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()


@dataclass(frozen=True)
class PassSpec:
    """A recorded pass compiled under guards. ``sizes``: what each of the pass's sizes must be, a number or an expression in the symbols.
    ``verdicts``: as in :class:`VariantSpec`.

    ``speed``: what such a pass took in the process that recorded it: by eager and compiled (up to format 1.13 also with its tape interpreted; then
    ``chosen`` may be another one, and the code is not run). The whole of ``backward()`` counts; what the compiled pass takes is what the interpreted
    one took there, times the ratio of the two on the recorded values."""

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
    """Backward passes of one fingerprint (``tape.py``). ``nodes``: the autograd nodes' names. ``seconds``: of running the tape uncompiled."""

    fingerprint: str
    nodes: tuple[str, ...]
    operations: int
    variants: tuple[PassSpec, ...]
    seconds: float = 0.0


@dataclass(frozen=True)
class StateSpec:
    """A parameter or buffer of an entry. Ties are two names with one ``weight``."""

    name: str  # "layers.0.weight"
    weight: str  # key in the package's weights
    parameter: bool
    requires_grad: bool
    persistent: bool = True  # False: a buffer that state_dict() leaves out


@dataclass(frozen=True)
class Interval:
    """Numbers between two, of which None is far out; ``open``: without the end itself."""

    low: float | None = None
    high: float | None = None
    low_open: bool = True
    high_open: bool = True


@dataclass(frozen=True)
class NumberSpec:
    """A number that the graphs of a step read when they run, so that a learning-rate scheduler may change it: ``param_groups[group][key]``,
    ``[position]`` of it where that is a list. Group -1 is the entry's own: "clip_norm", "clip_value", "loss_scale". ``allowed``: where the code
    that was compiled holds (``weight_decay`` may not become 0 where it was not); nothing: anywhere. Its place in the vector of numbers is its
    place in this list plus 2; of the first two elements one is 1 where gradients are added to those that have been accumulated (else they
    replace them), the other where the optimizer has no state yet (else 0)."""

    group: int
    key: str
    position: int
    value: float
    allowed: tuple[Interval, ...] = ()


@dataclass(frozen=True)
class GroupSpec:
    """A parameter group: the parameters' names, in the module, and everything else in it as JSON."""

    parameters: tuple[str, ...]
    options: str


@dataclass(frozen=True)
class OptimizerStateSpec:
    """One tensor of the optimizer's state. ``state``: its name in the entry's ``state``. More than one parameter shares it where it counts
    their steps."""

    key: str  # "exp_avg"
    parameters: tuple[str, ...]
    state: str
    starts_as: int = -1  # the place in ``numbers`` of the one that every element is before the first step, also when a scheduler has changed it


@dataclass(frozen=True)
class GradientSlot:
    """Where a parameter's gradient is accumulated: its name in the entry's ``state``."""

    parameter: str
    state: str


@dataclass(frozen=True)
class StepSpec:
    """The optimizer of a ``step`` entry. Parameters and buffers of the module are called ``module.NAME`` in the entry's ``state``."""

    optimizer: str  # "torch.optim.adamw.AdamW"
    defaults: str  # JSON
    groups: tuple[GroupSpec, ...]
    numbers: tuple[NumberSpec, ...]
    state: tuple[OptimizerStateSpec, ...]
    gradients: tuple[GradientSlot, ...] = ()  # of entries whose gradients can be accumulated
    update: Plan | None = None  # the optimizer alone, on accumulated gradients
    fresh: bool = True  # the optimizer had made no step when it was exported, so that its ``state_dict`` had no state
    norm: bool = False  # the last result of ``step`` and ``update``, but for ``finite``, is the norm of all gradients before clipping
    finite: bool = False  # the very last is whether all gradients were finite; where not, nothing was changed
    in_place: bool = False  # a call that fails for want of memory has changed nothing


@dataclass(frozen=True)
class StateSlot:
    """One tensor of an optimizer's state of a parameter, ``optimizer.state[parameter][key]``."""

    key: str
    parameter: str


@dataclass(frozen=True)
class UpdateSpec:
    """A step of an optimizer of the script's own, recorded beside its backward passes: one library, which writes parameters and state in place.

    Parameters are called by their group and their place in it, ``"0.3"`` for ``param_groups[0]["params"][3]``. The library takes the gradients of
    ``trained``, those parameters, the tensors of ``state``, and the vector of numbers, whose first two elements are 0 (see :class:`NumberSpec`); its
    one result, a number, says nothing. ``groups``: what is in them beside numbers is fixed. ``state``: parameters of ``trained`` have these tensors
    and no others. ``speed``: of the whole step, in the process that recorded it, by eager as the script had it ("foreach", "fused") and compiled."""

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
    """Calls of ``torch.nn.utils.clip_grad_norm_`` or ``clip_grad_value_`` of a recorded script: one library, which writes gradients in place.

    It takes the gradients that the call's parameters have, in order, and a vector of two numbers, float64: ``max_norm`` or ``clip_value``, and 1
    where gradients whose norm is Inf or NaN are to stay as they are, else 0. Its one result is the total norm, or, of ``clip_grad_value_``, a
    number that says nothing. ``norm_type``: as Python writes the float, ``"2.0"`` or ``"inf"``; "" of ``clip_grad_value_``. ``speed``: of the whole
    call."""

    function: str  # "clip_grad_norm_" or "clip_grad_value_"
    norm_type: str
    library: str
    verdict: Verdict
    verdicts: tuple[Verdict, ...] = ()
    speed: Speed | None = None


@dataclass(frozen=True)
class LayerSpec:
    """A submodule of an exported module, or itself (name ""), as ``attach`` compares it with a live one.

    ``settings``: its attributes that are numbers, texts, dtypes, None, or lists and tuples of such, as Python writes them: {"p": "0.1"}; functions
    and classes by their names. ``source``: SHA-256 of the source of its class and the bases of that, "" of PyTorch's own. ``hooks``: whether calls of
    it run hooks. ``replaced``: whether it had a forward of its own, not that of its class."""

    name: str
    kind: str  # its class, "torch.nn.modules.dropout.Dropout"; "Net" of one that is not PyTorch's
    settings: dict[str, str] = field(default_factory=dict)
    source: str = ""
    hooks: bool = False
    replaced: bool = False


@dataclass(frozen=True)
class EntrySpec:
    kind: str  # "module", "grad", "replay" or "step"
    state: tuple[StateSpec, ...]
    variants: tuple[VariantSpec, ...]
    modules: tuple[str, ...] = ()  # every submodule's name, so that empty ones are rebuilt too
    training: bool = True  # the mode it is loaded in
    wrt: tuple[str, ...] = ()  # of a grad entry: ``parameter:NAME`` or ``input:I``, in the order returned
    names: tuple[str, ...] = ()  # what the caller reads each gradient as
    single: bool = False  # the gradient itself comes back, not a dict of one
    has_aux: bool = False
    structures: tuple[StructureSpec, ...] = ()  # of a replay entry
    step: StepSpec | None = None  # of a step entry
    updates: tuple[UpdateSpec, ...] = ()  # of a replay entry
    clippings: tuple[ClippingSpec, ...] = ()  # of a replay entry
    layers: tuple[LayerSpec, ...] = ()  # of a module entry: itself and every submodule
    standalone: str = ""  # "verified": the C library gave the stored results without PyTorch; else why not, or "" where it was not tried

    @property
    def in_place(self) -> tuple[UpdateSpec | ClippingSpec, ...]:
        """What of a replay entry writes to tensors of the script."""
        return *self.updates, *self.clippings

    @property
    def program_state(self) -> list[StateSpec]:
        """The program's parameters and buffers, without what a training step adds: optimizer state, numbers, accumulated gradients."""
        added = {"numbers", *(s.state for s in self.step.state), *(g.state for g in self.step.gradients)} if self.step else set()
        return [s for s in self.state if s.name not in added]


@dataclass(frozen=True)
class WeightSpec:
    """A stored tensor: shape and strides in elements. The file holds it row-major; other strides are laid out at load.

    With ``fill`` it is not in the file: every element is that number."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    sha256: str  # of the row-major bytes
    fill: float | None = None


@dataclass(frozen=True)
class ConstantSpec:
    """A constant of a library that is bound to a weight by pointer. ``name`` is the library's own for it."""

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

    ``builds``: the same for each of ``Manifest.targets``. ``graph``: the member that holds the graph as data, or ""."""

    member: str
    metadata: str  # the adjacent *_metadata.json
    extern: str  # the adjacent JSON of operators that go through the proxy executor, or ""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    constants: tuple[ConstantSpec, ...]
    needed: tuple[str, ...]  # shared libraries it must be linked with (DT_NEEDED)
    glibc: str  # highest symbol version it asks for, "2.34"
    glibcxx: str
    nodes: int  # of the graph it was compiled from
    operators: tuple[str, ...] = ()  # that go through the proxy executor
    builds: tuple[BuildSpec, ...] = ()
    graph: str = ""

    @property
    def every_build(self) -> tuple[LibrarySpec | BuildSpec, ...]:
        """Itself, for the first target, and those for the further ones."""
        return (self, *self.builds)


@dataclass(frozen=True)
class Target:
    device: str  # "cpu" or "cuda"
    machine: str = "x86_64"
    march: str = ""
    cpu_flags: tuple[str, ...] = ()  # as /proc/cpuinfo writes them
    cuda_arch: str = ""  # "sm_90"
    cuda: str = ""  # version of CUDA
    name: str = ""  # "cpu:avx2", as it is asked for

    @property
    def label(self) -> str:
        """Its name; one that was written without has its device's."""
        return self.name or self.device

    @property
    def level(self) -> str:
        """The part of the name that tells targets of one device apart: "avx2"."""
        return self.name.partition(":")[2] or "default"


@dataclass(frozen=True)
class Member:
    size: int
    sha256: str


@dataclass(frozen=True)
class OperatorSpec:
    """What registered an operator in the process that exported it.

    ``module``: the Python module; "__main__" for a script's own, which cannot be imported by name; "" where none is known. ``file``: the name of the
    file that did ("moe.py", "libmine.so"), for people; "" where that is not known."""

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
    notes: dict[str, str] = field(default_factory=dict)  # for people to read; the runtime never does
    targets: tuple[Target, ...] = ()  # further ones, for each of which every library has a build
    operators: dict[str, OperatorSpec] = field(default_factory=dict)  # that libraries call and PyTorch does not have, "mine::cube"
