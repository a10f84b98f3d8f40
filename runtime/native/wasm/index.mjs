// Gradients and training steps in a browser or in Node.js, from a package that was linked into module.wasm.
//
//     import { load } from "./digits/index.mjs";
//     const step = (await load()).step();
//     const { loss } = step.run({ x: { data: pixels, shape: [32, 64] }, y: labels });
//
// The functions are those of aot_backward.h, which has the details; index.d.mts has the types.

import makeModule from "./module.mjs";

// The classes of Python's errors, by aotb_status.
const ERRORS = ["", "PackageError", "PackageError", "IncompatibleError", "SignatureError", "PackageError", "InputError", "StateError", "ExecutionError", "OutOfMemoryError"];
const [INPUTS, OUTPUTS, GRADIENTS, INCOMING, STATES, NUMBERS] = [0, 1, 2, 3, 4, 5];
const TENSOR = 40, DESCRIPTION = 40, PROGRESS = 40; // bytes; linked.c compares them with the structs
const DTYPES = {
  int8: [0, 8, Int8Array], int16: [0, 16, Int16Array], int32: [0, 32, Int32Array], int64: [0, 64, BigInt64Array],
  uint8: [1, 8, Uint8Array], uint16: [1, 16, Uint16Array], uint32: [1, 32, Uint32Array], uint64: [1, 64, BigUint64Array],
  float16: [2, 16, Uint16Array], float32: [2, 32, Float32Array], float64: [2, 64, Float64Array],
  bfloat16: [4, 16, Uint16Array], complex64: [5, 64, Float32Array], complex128: [5, 128, Float64Array], bool: [6, 8, Uint8Array],
};

/** An error of the C library; `name` is the class that Python raises. */
export class AotBackwardError extends Error {
  constructor(name, message) {
    super(message);
    this.name = name;
  }
}

function wrong(message) {
  return new AotBackwardError("InputError", message);
}

/** Opens the package that lies next to this file. */
export async function load(options) {
  const { wasm, data, unchecked = false } = options ?? {};
  const [wasmBinary, bytes] = await Promise.all([read("module.wasm", wasm), read("package.pt2", data)]);
  let module;
  try {
    module = await makeModule({ wasmBinary });
  } catch (error) {
    throw new AotBackwardError("PackageError", `module.wasm: expected the module that module.mjs belongs to, got another file, or this browser is too old: ${error.message}`);
  }
  return new Package(module, bytes, unchecked);
}

async function read(name, given = name) {
  if (given instanceof Uint8Array) return given;
  if (given instanceof ArrayBuffer) return new Uint8Array(given);
  if (typeof given !== "string" && !(given instanceof URL)) throw wrong(`${name}: expected a Uint8Array, an ArrayBuffer or a URL, got ${given?.constructor?.name ?? given}`);
  const url = new URL(given, import.meta.url);
  if (url.protocol === "file:") return new Uint8Array(await (await import("node:fs/promises")).readFile(url));
  const response = await fetch(url);
  if (!response.ok) throw new AotBackwardError("PackageError", `${url}: expected a file, got HTTP status ${response.status}. Copy the whole folder to the server.`);
  return new Uint8Array(await response.arrayBuffer());
}

/** The module's memory and the C functions, with errors as exceptions. */
class Native {
  constructor(module) {
    this.module = module;
    this.scratch = [];
  }

  get view() {
    return new DataView(this.module.HEAPU8.buffer); // another one after memory has grown
  }

  take(bytes) {
    const at = bytes < 2 ** 31 ? this.module._malloc(Math.max(bytes, 1)) : 0;
    if (!at) throw new AotBackwardError("OutOfMemoryError", `memory: expected ${bytes} free bytes, got none`);
    this.scratch.push(at);
    return at;
  }

  /** The same, filled with zeros. */
  cleared(bytes) {
    const at = this.take(bytes);
    this.module.HEAPU8.fill(0, at, at + bytes);
    return at;
  }

  text(words) {
    if (typeof words !== "string" || words.includes("\0")) throw wrong(`name: expected a text, got ${JSON.stringify(words)}`);
    const bytes = new TextEncoder().encode(words);
    const at = this.cleared(bytes.length + 1);
    this.module.HEAPU8.set(bytes, at);
    return at;
  }

  read(at) {
    return at ? this.module.UTF8ToString(at) : null;
  }

  /** Runs `work`, and frees what it took, or adds it to `kept`. */
  during(work, kept) {
    const before = this.scratch.length;
    try {
      return work();
    } finally {
      const taken = this.scratch.splice(before);
      if (kept) kept.push(...taken);
      else this.free(taken);
    }
  }

  free(taken) {
    for (const at of taken.splice(0)) if (!this.ended) this.module._free(at);
  }

  call(name, ...args) {
    if (this.ended) throw new AotBackwardError("ExecutionError", this.ended);
    let status;
    try {
      status = this.module[`_${name}`](...args);
    } catch (error) {
      if (!(error instanceof WebAssembly.RuntimeError || error instanceof WebAssembly.Exception)) throw error;
      this.ended = `module.wasm: expected a result, got the end of the module (${error.message}). Call load() again.`;
      throw new AotBackwardError("ExecutionError", this.ended);
    }
    if (status) throw new AotBackwardError(ERRORS[status] ?? "AotBackwardError", this.read(this.module._aotb_error()).replace(/aotb_(?=\w)/g, ""));
  }
}

class Package {
  #native;
  #at;

  constructor(module, bytes, unchecked) {
    const native = (this.#native = new Native(module));
    module.FS.writeFile("/package.pt2", bytes);
    native.during(() => {
      const out = native.cleared(4), options = native.cleared(12);
      native.view.setInt32(options + 8, unchecked ? 1 : 0, true);
      native.call("aotb_open", native.text("/package.pt2"), options, out);
      this.#at = native.view.getUint32(out, true);
    });
    this.digest = native.read(module._aotb_digest(this.#at));
    this.entries = [];
    for (let i = 0; i < module._aotb_entries(this.#at); i++)
      this.entries.push({ name: native.read(module._aotb_entry(this.#at, i)), kind: native.read(module._aotb_entry_kind(this.#at, i)) });
  }

  metadata(entry) {
    const native = this.#native;
    const text = native.during(() => native.read(native.module._aotb_metadata(this.#at, entry === undefined ? 0 : native.text(entry))));
    if (text === null) throw wrong(`entry '${entry}': expected one of ${this.entries.map((e) => e.name).join(", ")}`);
    return JSON.parse(text);
  }

  seed(value) {
    if (typeof value !== "bigint" && !Number.isSafeInteger(value)) throw wrong(`seed: expected an integer, got ${value}`);
    this.#native.call("aotb_seed", this.#at, BigInt.asUintN(64, exact(BigInt(value), value < 0 ? 63 : 64, "seed")));
  }

  grad(name) {
    return this.#get(Grad, "grad", name);
  }

  function(name) {
    return this.#get(Callable, "function", name);
  }

  step(name) {
    return this.#get(Step, "step", name);
  }

  module(name) {
    return this.#get(Module, "module", name);
  }

  #get(of, kind, name) {
    const all = this.entries.filter((e) => e.kind === kind && (name === undefined || e.name === name));
    const listed = this.entries.map((e) => `${e.name} (${e.kind})`).join(", ");
    if (all.length !== 1) throw wrong(`${kind}(${name === undefined ? "" : `"${name}"`}): expected one ${kind} of this package, got ${all.length}. It has: ${listed}.`);
    return new of(this.#native, this.#at, all[0].name);
  }
}

/** What all kinds of entries have: inputs, state, and calls. */
class Entry {
  _native;
  #at;
  #described = new Map();
  _inputs = []; // memory of the inputs of a forward, which its backward reads

  constructor(native, owner, name) {
    this._native = native;
    native.during(() => {
      const out = native.cleared(4);
      native.call("aotb_get", owner, native.text(name), out);
      this.#at = native.view.getUint32(out, true);
    });
    native.call("aotb_convert", this._at, 1); // numbers of JavaScript are float64, and few programs have 64-bit integers
    this.name = name;
  }

  get _at() {
    if (!this.#at) throw wrong(`${this.name}: expected an entry in use, got one after free(). Take it from the package again.`);
    return this.#at;
  }

  /** Names, dtypes and sizes of the inputs of a variant; a dynamic size is an expression, such as "s0". */
  inputs(variant = 0) {
    return this._described(variant, INPUTS).map(({ name, dtype, shape }) => ({ name, dtype, shape }));
  }

  get states() {
    return this._described(0, STATES).map((s) => s.name);
  }

  /** A copy of a parameter, buffer or optimizer state tensor. */
  state(name) {
    return this._native.during(() => this._read(this._state(name)));
  }

  setState(name, tensor) {
    const native = this._native;
    native.during(() => {
      const given = plain(tensor, name), { memory, shape, strides, dtype } = this._opened(this._state(name));
      if (`${given.shape}` !== `${shape}` || given.dtype !== dtype)
        throw wrong(`${name}: expected ${dtype} of shape [${shape}], got ${given.dtype} of shape [${given.shape}]`);
      if (isRowMajor(shape, strides)) memory.set(given.data);
      else placesOf(shape, strides, dtype).forEach((place, i) => (memory[place] = given.data[i]));
    });
  }

  train(training = true) {
    this._native.call("aotb_train", this._at, training ? 1 : 0);
    return this;
  }

  eval() {
    return this.train(false);
  }

  free() {
    if (!this.#at) return;
    this._native.free(this._inputs);
    if (!this._native.ended) this._native.module._aotb_free(this.#at);
    this.#at = 0;
  }

  _described(variant, part) {
    const native = this._native, out = [], key = `${variant} ${part}`;
    if (this._at && this.#described.has(key)) return this.#described.get(key);
    for (let i = 0; i < native.module._aotb_count(this._at, variant, part); i++) {
      native.during(() => {
        const at = native.cleared(DESCRIPTION);
        native.call("aotb_describe", this._at, variant, part, i, at);
        const view = native.view, shape = [];
        for (let d = 0; d < view.getInt32(at + 8, true); d++) shape.push(size(native.read(view.getUint32(view.getUint32(at + 12, true) + 4 * d, true))));
        out.push({
          name: native.read(view.getUint32(at, true)),
          dtype: dtypeName(view.getUint8(at + 4), view.getUint8(at + 5)),
          shape,
          group: Number(view.getBigInt64(at + 16, true)),
          position: Number(view.getBigInt64(at + 24, true)),
          value: view.getFloat64(at + 32, true),
        });
      });
    }
    if (part !== NUMBERS) this.#described.set(key, out); // only these have values that change
    return out;
  }

  _state(name) {
    const at = this._native.cleared(TENSOR);
    this._native.call("aotb_state", this._at, this._native.text(name), at);
    return at;
  }

  _run(function_, inputs) {
    const native = this._native, variants = Array.from({ length: native.module._aotb_variants(this._at) }, (_, v) => v);
    const most = Math.max(...variants.map((v) => this._results(v).length)), lists = variants.map((v) => this._described(v, INPUTS).map((d) => d.name));
    const fits = (names) => (Array.isArray(inputs) ? inputs.length === names.length : `${Object.keys(inputs ?? {}).sort()}` === `${[...names].sort()}`);
    const given = ordered(inputs, lists.find(fits) ?? lists[0], this.name);
    const forward = function_ === "aotb_forward";
    return native.during(
      () => {
        const array = this._write(given), results = native.cleared(TENSOR * most);
        if (forward) native.free(this._inputs); // not before: until C knows of it, a backward may follow the last forward
        native.call(function_, this._at, array, given.length, results, most);
        const found = { first: null, outputs: {}, gradients: {} };
        this._results(native.module._aotb_served(this._at)).forEach(([part, name], i) => {
          const tensor = this._read(results + TENSOR * i);
          if (i === 0) found.first = tensor;
          found[part][unused(name, found[part])] = tensor;
        });
        return found;
      },
      forward ? this._inputs : undefined,
    );
  }

  _results(variant) {
    return this._described(variant, OUTPUTS).map((d) => ["outputs", d.name]);
  }

  /** Writes tensors into an array of DLTensor; null is no tensor, where there may be none. */
  _write(tensors, optional = false) {
    const native = this._native, array = native.cleared(TENSOR * tensors.length);
    tensors.forEach(([name, value], i) => {
      if (value === null && optional) return;
      const { data, shape, dtype } = plain(value, name), [code, bits] = DTYPES[dtype], at = array + TENSOR * i;
      const place = native.take(data.byteLength), sizes = native.take(8 * shape.length);
      native.module.HEAPU8.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), place);
      const view = native.view;
      shape.forEach((n, d) => view.setBigInt64(sizes + 8 * d, BigInt(n), true));
      view.setUint32(at, place, true);
      view.setInt32(at + 4, 1, true);
      view.setInt32(at + 12, shape.length, true);
      view.setUint8(at + 16, code);
      view.setUint8(at + 17, bits);
      view.setUint16(at + 18, 1, true);
      view.setUint32(at + 20, sizes, true);
    });
    return array;
  }

  /** Copies a tensor out of the module's memory, in row-major order; null if it is no tensor. */
  _read(at) {
    if (this._native.view.getInt32(at + 12, true) < 0) return null;
    const { memory, shape, strides, dtype } = this._opened(at);
    if (isRowMajor(shape, strides)) return { data: memory.slice(), shape, dtype };
    const places = placesOf(shape, strides, dtype), data = new memory.constructor(places.length);
    places.forEach((place, i) => (data[i] = memory[place]));
    return { data, shape, dtype };
  }

  /** A tensor's memory as a typed array, which is valid until the next call of a C function. */
  _opened(at) {
    const view = this._native.view, rank = view.getInt32(at + 12, true), dtype = dtypeName(view.getUint8(at + 16), view.getUint8(at + 17));
    const sizes = view.getUint32(at + 20, true), steps = view.getUint32(at + 24, true), shape = [], strides = [];
    for (let d = 0; d < rank; d++) shape.push(Number(view.getBigInt64(sizes + 8 * d, true)));
    for (let d = rank - 1, step = 1; d >= 0; step *= shape[d--]) strides[d] = steps ? Number(view.getBigInt64(steps + 8 * d, true)) : step;
    const from = view.getUint32(at, true) + Number(view.getBigUint64(at + 32, true)), array = DTYPES[dtype][2];
    if (shape.includes(0)) return { memory: new array(0), shape, strides, dtype };
    const span = 1 + shape.reduce((a, n, d) => a + (n - 1) * strides[d], 0);
    return { memory: new array(this._native.module.HEAPU8.buffer, from, span * partsOf(dtype)), shape, strides, dtype };
  }
}

class Callable extends Entry {
  run(inputs) {
    const { first, outputs } = this._run("aotb_run", inputs);
    return { output: first, outputs };
  }
}

class Grad extends Entry {
  /** Multiplies a gradient in every call: -1 makes forces of the gradient of an energy. */
  scale(gradient, factor) {
    if (typeof factor !== "number") throw wrong(`scale: expected a number, got ${typeof factor}`);
    this._native.during(() => this._native.call("aotb_scale", this._at, this._native.text(gradient), factor));
    return this;
  }

  run(inputs) {
    const { first, outputs, gradients } = this._run("aotb_run", inputs);
    return { value: number(first), outputs, gradients };
  }

  _results(variant) {
    return [...super._results(variant), ...this._described(variant, GRADIENTS).map((d) => ["gradients", d.name])];
  }
}

class Module extends Callable {
  #forwarded = 0; // the variant

  forward(inputs) {
    const { first, outputs } = this._run("aotb_forward", inputs);
    this.#forwarded = this._native.module._aotb_served(this._at);
    return { output: first, outputs };
  }

  /** The gradients of parameters and inputs, by name, after forward(); `incoming`: the gradients of the outputs, by their names or in their order. */
  backward(incoming) {
    const native = this._native, variant = this.#forwarded;
    const given = ordered(incoming, this._described(variant, INCOMING).map((d) => d.name), this.name);
    const names = this._described(variant, GRADIENTS).map((d) => d.name);
    return native.during(() => {
      const array = this._write(given, true), results = native.cleared(TENSOR * names.length), gradients = {};
      native.call("aotb_backward", this._at, array, given.length, results, names.length);
      names.forEach((name, i) => (gradients[unused(name, gradients)] = this._read(results + TENSOR * i)));
      return { gradients };
    });
  }
}

class Step extends Entry {
  /** Runs forward, backward and the optimizer's update. */
  run(inputs) {
    const { first, outputs } = this._run("aotb_run", inputs);
    return { loss: number(first), outputs };
  }

  accumulate(inputs) {
    const { first, outputs } = this._run("aotb_accumulate", inputs);
    return { loss: number(first), outputs };
  }

  update() {
    this._native.call("aotb_update", this._at);
  }

  zeroGrad() {
    this._native.call("aotb_zero_grad", this._at);
  }

  /** The numbers of the optimizer that can change, such as lr. */
  get numbers() {
    return this._described(0, NUMBERS).map(({ name, group, position, value }) => ({ name, group, position, value }));
  }

  setNumber(name, value, { group = 0, position = -1 } = {}) {
    if (typeof value !== "number" || !Number.isSafeInteger(group) || !Number.isSafeInteger(position))
      throw wrong(`setNumber: expected a number, and integers for group and position, got ${value}, ${group} and ${position}`);
    this._native.during(() => this._native.call("aotb_number", this._at, BigInt(group), this._native.text(name), BigInt(position), value));
  }

  get progress() {
    const native = this._native;
    return native.during(() => {
      const at = native.cleared(PROGRESS);
      native.call("aotb_progress_of", this._at, at);
      const [updates, skipped, accumulated] = [0, 8, 16].map((offset) => Number(native.view.getBigInt64(at + offset, true)));
      return { updates, skipped, accumulated, gradNorm: native.view.getFloat64(at + 24, true), lossScale: native.view.getFloat64(at + 32, true) };
    });
  }

  /** The whole training state as the bytes of a file, which Python's and C's resume() read too. `extra`: a value for JSON, such as an epoch. */
  save(extra) {
    const native = this._native, FS = native.module.FS;
    native.during(() => native.call("aotb_save", this._at, native.text("/state"), extra === undefined ? 0 : native.text(JSON.stringify(extra))));
    const bytes = FS.readFile("/state");
    FS.unlink("/state");
    return bytes;
  }

  /** Restores a state of save(), and returns its `extra`. */
  resume(bytes) {
    if (!(bytes instanceof Uint8Array)) throw wrong(`resume: expected a Uint8Array, got ${bytes?.constructor?.name ?? bytes}`);
    const native = this._native, FS = native.module.FS;
    FS.writeFile("/state", bytes);
    try {
      return native.during(() => {
        const extra = native.cleared(4);
        native.call("aotb_resume", this._at, native.text("/state"), extra);
        const text = native.read(native.view.getUint32(extra, true));
        return text ? JSON.parse(text) : null;
      });
    } finally {
      FS.unlink("/state");
    }
  }
}

function size(text) {
  return /^\d+$/.test(text) ? Number(text) : text;
}

function dtypeName(code, bits) {
  return Object.keys(DTYPES).find((name) => DTYPES[name][0] === code && DTYPES[name][1] === bits);
}

function isRowMajor(shape, strides) {
  for (let d = shape.length - 1, step = 1; d >= 0; step *= shape[d--]) if (shape[d] > 1 && strides[d] !== step) return false;
  return true;
}

/** The places of a tensor's elements in its memory, in row-major order. */
function placesOf(shape, strides, dtype) {
  const parts = partsOf(dtype), count = shape.reduce((a, b) => a * b, 1), places = new Uint32Array(count * parts), index = shape.map(() => 0);
  for (let i = 0, place = 0; i < count; i++) {
    for (let p = 0; p < parts; p++) places[parts * i + p] = parts * place + p;
    for (let d = shape.length - 1; d >= 0; d--) {
      place += strides[d];
      if (++index[d] < shape[d]) break;
      place -= strides[d] * shape[d];
      index[d] = 0;
    }
  }
  return places;
}

function partsOf(dtype) {
  return dtype.startsWith("complex") ? 2 : 1;
}

/** The number in a tensor of one element. */
function number({ data, dtype }) {
  const bits = Number(data[0]);
  if (dtype === "bfloat16") return new Float32Array(Uint32Array.of(bits << 16).buffer)[0];
  if (dtype !== "float16") return bits;
  const exponent = (bits >> 10) & 31, fraction = bits & 1023, sign = bits & 0x8000 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24);
}

/** `name`, or if it is taken (by a parameter called like an input), "name (2)". */
function unused(name, taken) {
  return Object.hasOwn(taken, name) ? unused(`${name} (2)`, taken) : name;
}

/** Pairs of names and values, in the order of `names`. */
function ordered(values, names, entry) {
  if (Array.isArray(values)) {
    if (values.length !== names.length) throw wrong(`${entry}: expected ${names.length} tensors (${names.join(", ")}), got ${values.length}`);
    return names.map((name, i) => [name, values[i]]);
  }
  const given = Object.keys(values ?? {});
  const unknown = given.filter((name) => !names.includes(name)), missing = names.filter((name) => !given.includes(name));
  if (unknown.length || missing.length) throw wrong(`${entry}: expected tensors for ${names.join(", ") || "nothing"}, got ${given.join(", ") || "nothing"}`);
  return names.map((name) => [name, values[name]]);
}

/** A tensor as a typed array with shape and dtype; numbers and nested arrays of them are accepted. */
function plain(value, name) {
  const fault = (got) => wrong(`${name}: expected a number, nested arrays of numbers, a typed array, or {data, shape}, got ${got}`);
  if (["number", "bigint", "boolean"].includes(typeof value)) return { ...numbers([value], name, fault), shape: [] };
  if (Array.isArray(value)) {
    const shape = [];
    for (let level = value; Array.isArray(level); level = level[0]) shape.push(level.length);
    const flat = value.flat(Infinity);
    if (flat.length !== shape.reduce((a, b) => a * b, 1) || !fits(value, shape)) throw fault("arrays of different lengths");
    return { ...numbers(flat, name, fault), shape };
  }
  const data = ArrayBuffer.isView(value) ? value : value?.data, tag = data?.[Symbol.toStringTag]; // also of a Buffer, or of another frame
  if (!ArrayBuffer.isView(data) || tag === undefined || tag === "DataView") throw fault(value === null ? "null" : typeof value);
  const type = tag === "Uint8ClampedArray" ? "Uint8Array" : tag, is = (key) => DTYPES[key]?.[2].name === type;
  const dtype = value.dtype ?? Object.keys(DTYPES).find((key) => is(key) && !/^(float16|bfloat16|complex.*|bool)$/.test(key));
  if (!is(dtype)) throw wrong(`${name}: expected a dtype that a ${tag} has, got ${dtype}`);
  const shape = value.shape ?? [data.length / partsOf(dtype)];
  if (!Array.isArray(shape) || !shape.every((n) => Number.isSafeInteger(n) && n >= 0) || shape.reduce((a, b) => a * b, partsOf(dtype)) !== data.length)
    throw wrong(`${name}: expected a shape of ${data.length / partsOf(dtype)} elements, got [${shape}]`);
  return { data: dtype === "bool" ? data.map((n) => (n ? 1 : 0)) : data, shape, dtype };
}

/** Numbers as the typed array that holds them exactly: integers, unless one is -0, as int64. */
function numbers(flat, name, fault) {
  const are = (type) => flat.every((n) => typeof n === type);
  if (flat.length && are("boolean")) return { data: Uint8Array.from(flat, Number), dtype: "bool" };
  if (are("bigint") || flat.every((n) => Number.isSafeInteger(n) && !Object.is(n, -0))) {
    const whole = flat.map(BigInt), unsigned = whole.some((n) => n >= 2n ** 63n);
    const data = whole.map((n) => exact(n, unsigned ? 64 : 63, name));
    return unsigned ? { data: BigUint64Array.from(data), dtype: "uint64" } : { data: BigInt64Array.from(data), dtype: "int64" };
  }
  if (!are("number")) throw fault("an array with other elements");
  return { data: Float64Array.from(flat), dtype: "float64" };
}

/** `value`, if it has at most so many bits; negative ones are accepted with 63. */
function exact(value, bits, name) {
  const fits = bits === 64 ? BigInt.asUintN(64, value) === value : BigInt.asIntN(64, value) === value;
  if (!fits) throw wrong(`${name}: expected an integer of 64 bits, got ${value}`);
  return value;
}

function fits(value, [count, ...rest]) {
  return count === undefined ? !Array.isArray(value) : Array.isArray(value) && value.length === count && value.every((v) => fits(v, rest));
}
