"""The manifest's description of a variant: its call, its results and the inputs of its graphs."""

from __future__ import annotations

from aot_backward_runtime.format.manifest import VariantSpec, Verdict

from ..capture.joint_graph import Joint
from ..capture.partition import Partitions


def variant_spec(mode: str, joint: Joint, partitions: Partitions) -> VariantSpec:
    sizes = joint.sizes
    tensors = [(i, o) for i, o in enumerate(joint.outputs) if o is not None]
    outputs = []
    for i, output in tensors:
        if isinstance(output, tuple):
            value = joint.inputs[output[1]] if output[0] == "input" else joint.state[output[1]]
        else:
            value = output.meta["val"]
        outputs.append(sizes.spec(f"output[{i}]", value, joint.output_requires_grad[i]))
    cotangents = [sizes.spec(f"the gradient of output[{i}]", v, False) for i, v in zip(joint.cotangents, joint.cotangent_values, strict=True)]
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
