"""The manifest's description of a variant: its call, its results and the inputs of its graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from aot_backward_runtime.format.manifest import Tree, VariantSpec, Verdict

from ..capture.joint_graph import Joint
from ..capture.partition import Partitions


def variant_spec(mode: str, joint: Joint, partitions: Partitions) -> VariantSpec:
    sizes = joint.sizes
    tensors = [(i, o) for i, o in enumerate(joint.outputs) if o is not None]
    outputs, names = [], output_names(joint.out_tree, [i for i, _ in tensors])
    for i, output in tensors:
        if isinstance(output, tuple):
            value = joint.inputs[output[1]] if output[0] == "input" else joint.state[output[1]]
        else:
            value = output.meta["val"]
        outputs.append(sizes.spec(names[i], value, joint.output_requires_grad[i]))
    cotangents = [
        sizes.spec(f"the gradient of {names[i]}", v, False)
        for i, v in zip(joint.cotangents, joint.cotangent_values, strict=True)
    ]
    return VariantSpec(
        mode=mode,
        in_tree=joint.in_tree,
        out_tree=joint.out_tree,
        inputs=tuple(sizes.spec(n, t) for n, t in zip(joint.input_names, joint.inputs, strict=True)),
        outputs=tuple(outputs),
        cotangents=tuple(cotangents),
        differentiable=joint.differentiable,
        symbols=sizes.symbols,
        guards=sizes.guards(),
        ambient=joint.ambient,
        verdict=Verdict("not run"),
        forward=partitions.forward,
        backward=partitions.backward,
        inference=partitions.inference,
        gradient=partitions.gradient,
        step=partitions.step,
        accumulate=partitions.accumulate,
        argument_names=joint.argument_names,
        shared=joint.shared,
    )


def output_names(tree: Tree, flat: Sequence[int]) -> dict[int, str]:
    """Return the name of each output tensor by its number in ``flat``, the numbers of the tensors among all results:
    the tensor's keys ("energies", "a.b[0]"), or ``output[N]`` if it has none. If two have the same keys, their names
    begin with the place in the result, ``output[0].a``."""
    paths = {flat[number]: path for number, path in _leaves(tree, ())}
    keyed = {number: _keys(path) for number, path in paths.items()}
    counts = Counter(keyed.values())
    return {
        n: f"output[{n}]" if not keys else keys if counts[keys] == 1 else f"output{_text(paths[n])}"
        for n, keys in keyed.items()
    }


def _leaves(tree: Tree, path: tuple[str | int, ...]) -> Iterator[tuple[int, tuple[str | int, ...]]]:
    if tree.kind == "tensor":
        yield tree.index, path
    for number, child in enumerate(tree.children):
        yield from _leaves(child, (*path, str(tree.keys[number]) if tree.keys else number))


def _keys(path: tuple[str | int, ...]) -> str:
    """Return the path from its first key on; "" if it has none."""
    first = next((i for i, k in enumerate(path) if isinstance(k, str)), len(path))
    return _text(path[first:]).removeprefix(".")


def _text(path: tuple[str | int, ...]) -> str:
    return "".join(f".{k}" if isinstance(k, str) else f"[{k}]" for k in path)
