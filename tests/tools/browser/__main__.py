"""``python -m tests.tools.browser --docs docs/benchmarks/DATE-browser``: examples/browser in Node.js and in Chromium,
beside eager and the C library.

All train the same network on the same batches with the same dropout masks. Steps as ONNX graphs run in onnxruntime for
Python, Node.js and browsers. The types of ``index.d.mts`` are compiled by tsc. It needs emscripten, Node.js with npm,
and Chromium. Writes DOCS.md.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aot_backward_native as abn
import onnx
import onnxruntime
import torch
from torch import nn

import aot_backward as ab
from aot_backward import web

from ...support import chromium

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "examples" / "browser"
BATCH, TRAINING, STEPS, ONNX_STEPS = 32, 1344, 50, 20
PACKAGES = ("onnxruntime-node", "onnxruntime-web", "typescript")
Run = dict[str, Any]


def progress(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


class Browser:
    """One run; ``folder`` holds the example, what its commands write, and the packages of npm."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for source in (*EXAMPLE.iterdir(), *HERE.glob("*.m?s")):
            if source.is_file():
                shutil.copy(source, folder)
        self.load = os.getloadavg()[0]
        progress("npm install")
        # A script would fetch CUDA
        self.run("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", *PACKAGES)
        self.program = runpy.run_path(str(EXAMPLE / "export.py"))
        self.program["write_images"](folder / "digits.bin")
        progress("exporting")
        began = time.perf_counter()
        self.run(
            sys.executable, "-m", "aot_backward.cli", "export", "export.py:entries", "--format", "wasm", "-o", "digits"
        )
        self.export_seconds = time.perf_counter() - began
        ab.export(folder / "digits.pt2", self.program["entries"](), runtime="standalone")
        entry = self.program["entries"]()["train"]
        entry.module[6].p = 0.0  # ONNX has no such masks
        ab.export_onnx(folder / "train.onnx", {"train": entry})
        self.write_state_apart()
        rows = torch.frombuffer(bytearray((folder / "digits.bin").read_bytes()), dtype=torch.uint8).view(-1, 65)
        self.images, self.labels = rows[:, 1:].view(-1, 1, 8, 8).float() / 16, rows[:, 0].long()

    def write_state_apart(self) -> None:
        """onnxruntime-web takes no input that has a value in the graph."""
        graph = onnx.load(self.folder / "train.onnx")
        inputs = {i.name for i in graph.graph.input}
        values = [t for t in graph.graph.initializer if t.name in inputs]
        arrays = {t.name: onnx.numpy_helper.to_array(t) for t in values}
        for t in values:
            graph.graph.initializer.remove(t)
        onnx.save(graph, self.folder / "web.onnx")
        state = {
            name: {"type": str(v.dtype), "shape": v.shape, "data": v.reshape(-1).tolist()} for name, v in arrays.items()
        }
        (self.folder / "state.json").write_text(json.dumps(state))

    def run(self, *argv: object) -> str:
        done = subprocess.run(list(map(str, argv)), cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{argv[0]} failed: {(done.stderr or done.stdout)[-2000:]}")
        return done.stdout

    def losses(self, steps: int, step: Callable[[torch.Tensor, torch.Tensor], Any]) -> Run:
        losses, milliseconds = [], []
        for n in range(steps):
            rows = slice(n * BATCH % TRAINING, n * BATCH % TRAINING + BATCH)
            began = time.perf_counter()
            losses.append(float(step(self.images[rows], self.labels[rows])))
            milliseconds.append(1e3 * (time.perf_counter() - began))
        return {"losses": losses, "milliseconds": milliseconds}

    def eager(self, steps: int, dropout: float) -> Run:
        net = self.program["network"]()
        net[6].p = dropout
        optimizer = torch.optim.Adam(net.parameters(), lr=self.program["LEARNING_RATE"], fused=True)
        torch.manual_seed(0)

        def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = nn.functional.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return self.losses(steps, step)

    def native(self) -> Run:
        package = abn.load(self.folder / "digits.pt2")
        package.threads(1)
        package.seed(0)
        step = package.step("train")
        return self.losses(STEPS, lambda images, labels: step(images.numpy(), labels.numpy()))

    def onnx(self) -> Run:
        onnxruntime.set_default_logger_severity(3)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session, state = onnxruntime.InferenceSession(self.folder / "train.onnx", options), {}
        names = [o.name for o in session.get_outputs()]

        def step(images: torch.Tensor, labels: torch.Tensor) -> float:
            nonlocal state
            results = dict(
                zip(
                    names, session.run(names, {"input": images.numpy(), "target": labels.numpy(), **state}), strict=True
                )
            )
            state = {n.removeprefix("updated."): v for n, v in results.items() if n.startswith("updated.")}
            return float(results["loss"])

        return self.losses(ONNX_STEPS, step)

    def node(self, call: str) -> Run:
        script = f"""
        import {{ readFileSync }} from "node:fs";
        import {{ trained, trainedByOnnx }} from "./measure.mjs";
        const bytes = new Uint8Array(readFileSync("digits.bin")), state = JSON.parse(readFileSync("state.json"));
        process.stdout.write(JSON.stringify(await {call}));
        """
        (self.folder / "node.mjs").write_text(script)
        return json.loads(self.run("node", "node.mjs"))  # type: ignore[no-any-return]

    def chromium(self, call: str) -> Run:
        script = f"""
        import {{ trained, trainedByOnnx }} from "./measure.mjs";
        const bytes = new Uint8Array(await (await fetch("digits.bin")).arrayBuffer()), state = await (await fetch("state.json")).json();
        answer = await {call};
        """
        return chromium.answer_of(self.folder, script, timeout=120)  # type: ignore[no-any-return]

    def measured(self) -> dict[str, Any]:
        torch.set_num_threads(1)
        progress("tsc")
        self.run(
            "node_modules/.bin/tsc",
            *["--noEmit", "--strict", "--module", "nodenext", "--target", "es2022", "--lib", "es2022,dom", "types.mts"],
        )
        ways: dict[str, Callable[[], Run]] = {
            "eager PyTorch": lambda: self.eager(STEPS, 0.25),
            "C library": self.native,
            "Node.js": lambda: self.node(f"trained(bytes, {STEPS})"),
            "Chromium": lambda: self.chromium(f"trained(bytes, {STEPS})"),
        }
        onnx: dict[str, Callable[[], Run]] = {
            "eager PyTorch": lambda: self.eager(ONNX_STEPS, 0.0),
            "onnxruntime (Python)": self.onnx,
            "onnxruntime-node": lambda: self.node(
                f'trainedByOnnx((await import("onnxruntime-node")).default, "web.onnx", state, bytes, {ONNX_STEPS})'
            ),
            "onnxruntime-web": lambda: self.chromium(
                f'trainedByOnnx(await import("./node_modules/onnxruntime-web/dist/ort.wasm.min.mjs"), "web.onnx", state, bytes, {ONNX_STEPS})'
            ),
        }
        files = {name: (self.folder / "digits" / name).read_bytes() for name in web.FILES if name != "index.d.mts"}
        return {
            "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
            "torch": torch.__version__,
            "versions": {
                "emscripten": self.run("em++", "--version").split("\n")[0].split(") ")[-1].strip(" ()"),
                "node": self.run("node", "--version").strip(),
                "chromium": self.run("chromium", "--version").split()[1],
                **{
                    name: json.loads((self.folder / "node_modules" / name / "package.json").read_text())["version"]
                    for name in PACKAGES
                },
            },
            "load": self.load,
            "export seconds": self.export_seconds,
            "sizes": {name: [len(data), len(gzip.compress(data))] for name, data in files.items()},
            "steps": self.in_turns(ways),
            "onnx": self.in_turns(onnx),
        }

    def in_turns(self, ways: dict[str, Callable[[], Run]], turns: int = 3) -> dict[str, Run]:
        """Run all ways in turn; the least time of a step, because noise only adds, and the losses of the first turn."""
        runs: dict[str, list[Run]] = {name: [] for name in ways}
        for turn in range(turns):
            for name, way in ways.items():
                progress(f"turn {turn + 1}: {name}")
                runs[name].append(way())
        reference = runs["eager PyTorch"][0]["losses"]
        return {
            name: {
                "difference": max(abs(a - b) / abs(b) for a, b in zip(of[0]["losses"], reference, strict=True)),
                "ms": min(min(run["milliseconds"][3:]) for run in of),
                "median": statistics.median(t for run in of for t in run["milliseconds"][3:]),
                "first": min((run["first"] for run in of if "first" in run), default=None),
                "losses": of[0]["losses"],
            }
            for name, of in runs.items()
        }


def page(data: dict[str, Any]) -> str:
    def table(steps: dict[str, Run]) -> str:
        rows = [
            f"| {name} | {run['difference']:.1e} | {run['ms']:.2f} | {run['median']:.2f} |"
            for name, run in steps.items()
        ]
        return "\n".join(
            ["| way | largest difference of a loss | ms a step, least | median |", "|---|---|---|---|", *rows]
        )

    sizes = "\n".join(
        f"| {name} | {size / 1e3:.0f} | {small / 1e3:.0f} |" for name, (size, small) in data["sizes"].items()
    )
    total = [sum(pair[i] for pair in data["sizes"].values()) / 1e3 for i in (0, 1)]
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    first = ", ".join(f"{run['first']:.0f} ms in {name}" for name, run in data["steps"].items() if run["first"])
    return f"""# Training in a browser

`make browser`, {data["date"]}, torch {data["torch"]}, {versions}.
One thread each, in turn; load of the machine before: {data["load"]:.1f}.

`examples/browser`: a convolutional network on handwritten digits, {STEPS} steps of Adam with dropout, batches of {BATCH}. Losses are compared with
those of eager PyTorch, relative to them. The first step, with the module's compilation, takes {first}.
The export takes {data["export seconds"]:.0f} s.

{table(data["steps"])}

What the browser loads:

| file | kB | compressed (gzip) |
|---|---|---|
{sizes}
| all | {total[0]:.0f} | {total[1]:.0f} |

The same step without dropout as an ONNX graph, {ONNX_STEPS} steps:

{table(data["onnx"])}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path("build/browser"), help="where the example and the packages of npm go"
    )
    parser.add_argument("--docs", type=Path, required=True)
    options = parser.parse_args()
    data = Browser(options.folder.absolute()).measured()
    options.docs.with_suffix(".md").write_text(page(data))
    print(page(data))


if __name__ == "__main__":
    main()
