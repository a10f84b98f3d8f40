// Trains the exported network; page.mjs shows it, and the tests call it in Node.js.

const PIXELS = 64;

/** The images in [0, 1] and the labels of digits.bin: rows of a label and 64 pixels from 0 to 16, a byte each. */
export function imagesOf(bytes) {
  const count = bytes.length / (PIXELS + 1), images = new Float32Array(count * PIXELS), labels = new Int32Array(count);
  for (let i = 0; i < count; i++) {
    const row = bytes.subarray(i * (PIXELS + 1), (i + 1) * (PIXELS + 1));
    labels[i] = row[0];
    images.set(row.subarray(1).map((p) => p), i * PIXELS);
  }
  return { images: images.map((p) => p / 16), labels, count };
}

/** A batch of consecutive images. */
export function batchOf({ images, labels }, first, count) {
  return {
    input: { data: images.subarray(first * PIXELS, (first + count) * PIXELS), shape: [count, 1, 8, 8] },
    target: labels.subarray(first, first + count),
  };
}

/** Copies the weights that `step` has trained to `predict`. */
export function copyWeights(step, predict) {
  for (const name of predict.states) predict.setState(name, step.state(name));
}

/** The most likely digit of one image of 64 pixels. */
export function predicted(predict, pixels) {
  const { data } = predict.run([{ data: pixels, shape: [1, 1, 8, 8] }]).output;
  return data.indexOf(Math.max(...data));
}
