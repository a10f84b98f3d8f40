// Compiled by tsc, not run: the types of index.d.mts fit their use.
import { load, type Step, type Tensor } from "./digits/index.mjs";

const network = await load({ unchecked: false });
const step: Step = network.step("train");
const { loss, outputs } = step.run({ input: { data: new Float32Array(64), shape: [1, 1, 8, 8] }, target: [1] });
const number: number = loss;
const tensor: Tensor | undefined = outputs["output[0]"];
step.setNumber("lr", 0.1, { group: 0 });
const forces: ArrayLike<number | bigint> | undefined = network.grad().scale("x", -1).run([[1, 2]]).gradients["x"]?.data;
const shape: number[] = network.module().eval().forward([1]).output.shape;
console.log(number, tensor, forces, shape);
// @ts-expect-error a text is not a tensor
step.run({ input: "text" });
