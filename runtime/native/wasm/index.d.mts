/** Gradients and training steps from a package, in a browser or in Node.js. */

export type TypedArray =
  | Int8Array | Int16Array | Int32Array | BigInt64Array | Uint8Array | Uint16Array | Uint32Array | BigUint64Array | Float32Array | Float64Array;

export type Dtype =
  | "int8" | "int16" | "int32" | "int64" | "uint8" | "uint16" | "uint32" | "uint64" | "float16" | "float32" | "float64" | "bfloat16"
  | "complex64" | "complex128" | "bool";

/** A row-major tensor. Elements of float16 and bfloat16 are their 16 bits; of complex dtypes, pairs of numbers; of bool, 0 or 1. */
export interface Tensor {
  data: TypedArray;
  shape: number[];
  dtype: Dtype;
}

export type NestedNumbers = number | bigint | boolean | NestedNumbers[];

/** What a call accepts. The default shape has one dimension, and the default dtype is that of the array. Numbers are converted to the exported dtype
 * if they fit. */
export type TensorLike = NestedNumbers | TypedArray | { data: TypedArray | Uint8ClampedArray; shape?: number[]; dtype?: Dtype };

/** Tensors by the names of inputs(), or in their order. */
export type Inputs = Record<string, TensorLike> | TensorLike[];

/** By name; of two equal names, such as a parameter's and an input's, the second is "name (2)". */
export type Named = Record<string, Tensor>;

export interface Described {
  name: string;
  dtype: Dtype;
  /** A number, or an expression of dynamic sizes, such as "s0". */
  shape: (number | string)[];
}

export interface LoadOptions {
  /** The bytes of module.wasm, or its URL, relative to index.mjs. The default is the file next to it. */
  wasm?: Uint8Array | ArrayBuffer | string | URL;
  /** The same for package.pt2, such as one with other weights. */
  data?: Uint8Array | ArrayBuffer | string | URL;
  /** Also run entries that the export did not compare with eager PyTorch on this code. */
  unchecked?: boolean;
}

/** Opens the package that lies next to index.mjs. */
export function load(options?: LoadOptions): Promise<Package>;

export interface Package {
  /** The SHA-256 of the manifest. */
  readonly digest: string;
  readonly entries: { name: string; kind: "grad" | "function" | "step" | "module" }[];
  /** The author's metadata of the package, or of an entry. */
  metadata(entry?: string): Record<string, unknown>;
  /** Seeds dropout and random numbers as torch.manual_seed does. */
  seed(value: number | bigint): void;
  /** The entry of that name; without a name, the only one of its kind. Each result has its own weights. */
  grad(name?: string): Grad;
  function(name?: string): Callable;
  step(name?: string): Step;
  module(name?: string): Module;
}

export interface Entry {
  readonly name: string;
  /** The inputs of a variant, which is an exported example. */
  inputs(variant?: number): Described[];
  readonly states: string[];
  /** A copy of a parameter, buffer or optimizer state tensor. */
  state(name: string): Tensor;
  /** Changes one. The tensor must have its shape and dtype. */
  setState(name: string, tensor: TensorLike): void;
  /** Selects the variants of training mode, or of evaluation mode. */
  train(training?: boolean): this;
  eval(): this;
  /** Frees the memory. Later calls are errors. */
  free(): void;
}

export interface Callable extends Entry {
  /** Computes without gradients. `output` is the first of `outputs`. */
  run(inputs: Inputs): { output: Tensor; outputs: Named };
}

export interface Grad extends Entry {
  /** Multiplies a gradient in every call: -1 makes forces of the gradient of an energy. */
  scale(gradient: string, factor: number): this;
  /** `value` is the number that was differentiated. A gradient is null where Python has None. */
  run(inputs: Inputs): { value: number; outputs: Named; gradients: Record<string, Tensor | null> };
}

export interface Module extends Callable {
  forward(inputs: Inputs): { output: Tensor; outputs: Named };
  /** The gradients of parameters and inputs after forward(). `incoming`: the gradients of the outputs; null for none. */
  backward(incoming: Record<string, TensorLike | null> | (TensorLike | null)[]): { gradients: Record<string, Tensor | null> };
}

export interface Progress {
  updates: number;
  skipped: number;
  accumulated: number;
  gradNorm: number;
  lossScale: number;
}

export interface Step extends Entry {
  /** Runs forward, backward and the optimizer's update. */
  run(inputs: Inputs): { loss: number; outputs: Named };
  /** Adds to the gradients that update() uses. Needs an export with accumulate=True. */
  accumulate(inputs: Inputs): { loss: number; outputs: Named };
  update(): void;
  zeroGrad(): void;
  /** The numbers of the optimizer that can change, such as lr. */
  readonly numbers: { name: string; group: number; position: number; value: number }[];
  setNumber(name: string, value: number, options?: { group?: number; position?: number }): void;
  readonly progress: Progress;
  /** The training state as the bytes of a file, which Python and C read too. `extra`: a value for JSON. */
  save(extra?: unknown): Uint8Array;
  /** Restores a state of save() bit for bit, and returns its `extra`. */
  resume(bytes: Uint8Array): unknown;
}

/** An error. `name` is the class that Python raises: InputError, PackageError, StateError, ExecutionError, IncompatibleError, SignatureError or
 * OutOfMemoryError. */
export class AotBackwardError extends Error {
  constructor(name: string, message: string);
}
