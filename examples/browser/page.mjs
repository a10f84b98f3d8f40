import { load } from "./digits/index.mjs";
import { batchOf, copyWeights, imagesOf, predicted } from "./training.mjs";

const BATCH = 32, TRAINING = 1344; // images; the rest are for the accuracy
const by = (id) => document.getElementById(id);
const [network, bytes] = await Promise.all([load(), fetch("digits.bin").then((r) => r.arrayBuffer())]);
const digits = imagesOf(new Uint8Array(bytes)), predict = network.function("predict").eval();
let step, losses;

function reset() {
  step?.free();
  step = network.step("train");
  network.seed(0);
  losses = [];
  draw();
  by("status").textContent = "ready";
}

function accuracy() {
  let right = 0;
  copyWeights(step, predict);
  for (let i = TRAINING; i < digits.count; i++) right += predicted(predict, digits.images.subarray(64 * i, 64 * (i + 1))) === digits.labels[i];
  return right / (digits.count - TRAINING);
}

/** Trains on `count` batches, and lets the page draw after every eighth. */
async function train(count) {
  let computing = 0;
  by("train").disabled = by("reset").disabled = true;
  for (let n = 0; n < count; n++) {
    const from = performance.now();
    losses.push(step.run(batchOf(digits, (n * BATCH) % TRAINING, BATCH)).loss);
    computing += performance.now() - from;
    if (n % 8 === 7) {
      draw();
      await new Promise((done) => setTimeout(done));
    }
  }
  const milliseconds = computing / count;
  by("train").disabled = by("reset").disabled = false;
  by("status").textContent = `${losses.length} steps, ${milliseconds.toFixed(1)} ms each; accuracy ${(100 * accuracy()).toFixed(1)} %`;
  return { losses, milliseconds };
}

function draw() {
  const canvas = by("curve"), pen = canvas.getContext("2d"), highest = Math.max(2.5, ...losses);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.beginPath();
  losses.forEach((loss, i) => pen.lineTo(10 + (i * (canvas.width - 20)) / Math.max(losses.length - 1, 41), canvas.height - 10 - (loss / highest) * (canvas.height - 20)));
  pen.strokeStyle = "#c33";
  pen.stroke();
  pen.fillText(losses.length ? `loss ${losses.at(-1).toFixed(3)}` : "", 12, 14);
}

function guess() {
  copyWeights(step, predict);
  by("guess").textContent = predicted(predict, drawn());
}

/** The drawing as 8x8 pixels, each the mean of its square. */
function drawn() {
  const { data } = by("drawing").getContext("2d").getImageData(0, 0, 240, 240), pixels = new Float32Array(64);
  for (let y = 0; y < 240; y++) for (let x = 0; x < 240; x++) pixels[8 * Math.floor(y / 30) + Math.floor(x / 30)] += data[4 * (240 * y + x) + 3] / 255 / 900;
  const most = Math.max(...pixels);
  return most ? pixels.map((p) => p / most) : pixels;
}

const pen = by("drawing").getContext("2d", { willReadFrequently: true });
Object.assign(pen, { lineWidth: 26, lineCap: "round", lineJoin: "round" });
by("drawing").addEventListener("pointerdown", (e) => (pen.beginPath(), pen.moveTo(e.offsetX, e.offsetY)));
by("drawing").addEventListener("pointermove", (e) => e.buttons && (pen.lineTo(e.offsetX, e.offsetY), pen.stroke()));
by("drawing").addEventListener("pointerup", guess);
by("clear").onclick = () => (pen.clearRect(0, 0, 240, 240), (by("guess").textContent = "?"));
for (let digit = 0; digit < 10; digit++) {
  const button = by("labels").appendChild(document.createElement("button"));
  button.textContent = digit;
  button.onclick = () => {
    const pixels = drawn(), images = new Float32Array(128);
    images.set(pixels), images.set(pixels, 64); // the exported step takes two images at least
    for (let n = 0; n < 5; n++) losses.push(step.run({ input: { data: images, shape: [2, 1, 8, 8] }, target: [digit, digit] }).loss);
    draw();
    guess();
  };
}
by("train").onclick = () => train(TRAINING / BATCH);
by("reset").onclick = reset;
by("train").disabled = by("reset").disabled = false;
reset();
const asked = Number(new URLSearchParams(location.search).get("steps")); // of a test
if (asked) document.body.dataset.result = JSON.stringify(await train(asked));
