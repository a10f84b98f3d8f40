// Training in JavaScript, in Node.js and in a browser: called by __main__.py, in the folder of the example.

import { batchOf, imagesOf } from "./training.mjs";

const BATCH = 32, TRAINING = 1344;

/** Trains the example's network; its losses, and the milliseconds of each step. */
export async function trained(bytes, steps) {
  const { load } = await import("./digits/index.mjs");
  const began = performance.now(), network = await load(), step = network.step("train"), digits = imagesOf(bytes);
  network.seed(0);
  const losses = [], milliseconds = [];
  for (let n = 0; n < steps; n++) {
    const from = performance.now();
    losses.push(step.run(batchOf(digits, (n * BATCH) % TRAINING, BATCH)).loss);
    if (n === 0) var first = performance.now() - began;
    milliseconds.push(performance.now() - from);
  }
  return { losses, milliseconds, first };
}

/** Trains by the ONNX graph of the step: the state goes in and comes out. `ort`: onnxruntime-node, or onnxruntime-web. */
export async function trainedByOnnx(ort, graph, initial, bytes, steps) {
  const session = await ort.InferenceSession.create(graph), digits = imagesOf(bytes), losses = [], milliseconds = [];
  const state = {};
  for (const [name, { type, shape, data }] of Object.entries(initial)) state[name] = new ort.Tensor(type, type === "int64" ? data.map(BigInt) : data, shape);
  for (let n = 0; n < steps; n++) {
    const { input, target } = batchOf(digits, (n * BATCH) % TRAINING, BATCH), from = performance.now();
    const feeds = { input: new ort.Tensor("float32", input.data, input.shape), target: new ort.Tensor("int64", BigInt64Array.from(target, BigInt), [BATCH]) };
    const results = await session.run({ ...feeds, ...state });
    milliseconds.push(performance.now() - from);
    for (const [name, value] of Object.entries(results)) if (name.startsWith("updated.")) state[name.slice("updated.".length)] = value;
    losses.push(results.loss.data[0]);
  }
  return { losses, milliseconds };
}
