"""The way ``onnx``: export forward and backward of a case as ONNX graphs, run them with onnxruntime and NumPy arrays.

The export already compares them with eager. This module runs them again from the files, without code of this project,
and also on the second set of numbers.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import torch

import aot_backward as ab
from aot_backward.checks.named_results import Named
from aot_backward_runtime.errors import ExportError

from .cases import Case, Round
from .exporting import Running, Verdict, judge, reason


def settle(cases: Sequence[Case], size: int, running: Running, verdict: Verdict) -> None:
    """Give every case its verdict. Each case is alone, because there is no compilation to share."""
    for case in cases:
        running("exported", [case])
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="aot-backward-") as folder:
            try:
                entry = ab.Module(case.module.train(case.training), [ab.Variant(case.rounds[0].inputs)])
                ab.export_onnx(Path(folder) / "case.onnx", {"module": entry})
                results = [_run(Path(folder), case, one) for one in case.rounds]
            except Exception as error:
                verdict(case, *reason(error, [case]), time.monotonic() - start)
            else:
                found = judge(case, results)
                verdict(case, "wrong" if found else "pass", found, time.monotonic() - start)


def _run(folder: Path, case: Case, one: Round) -> Named:
    feeds = {f"tensors.{i}": _array(t) for i, t in enumerate(one.inputs)}
    known = {
        name.removeprefix("gradient of "): f"grad.{name.removeprefix('gradient of ')}"
        for name in one.eager
        if name.startswith("gradient of ")
    }
    out: dict[str, Any] = {}
    results = _session(
        folder / "case.forward.onnx" if (folder / "case.forward.onnx").exists() else folder / "case.inference.onnx",
        feeds,
    )
    if (folder / "case.backward.onnx").exists():
        incoming = {f"grad.output.{i}": _array(c) for i, c in zip(one.differentiable, one.cotangents, strict=True)}
        results |= _session(folder / "case.backward.onnx", feeds | results | incoming)
    buffers = dict(case.module.named_buffers())
    for name in one.eager:
        if name.startswith("output["):
            place = name[len("output[") : -1]
            out[name] = results.get(f"output.{place}")
        elif name.startswith("buffer "):
            out[name] = results.get(
                f"updated.{name.removeprefix('buffer ')}", _array(buffers[name.removeprefix("buffer ")])
            )
        else:
            which = name.removeprefix("gradient of ")
            which = f"tensors.{which[len('input[') : -1]}" if which.startswith("input[") and known else which
            out[name] = results.get(f"grad.{which}")
    missing = [n for n, t in out.items() if t is None and n.startswith("output[")]
    passed_on = {n: t for n in missing for t in one.inputs if one.eager[n] is not None and _same(t, one.eager[n])}
    tensors = {n: None if v is None else torch.from_numpy(v.copy()) for n, v in out.items()}
    return tensors | {n: t.detach() for n, t in passed_on.items()}


def _same(tensor: torch.Tensor, other: Any) -> bool:
    return tensor.shape == other.shape and tensor.dtype == other.dtype and torch.equal(tensor, other)


def _session(path: Path, feeds: dict[str, Any]) -> dict[str, Any]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    asked = {i.name for i in session.get_inputs()}
    names = [o.name for o in session.get_outputs()]
    try:
        return dict(zip(names, session.run(names, {n: v for n, v in feeds.items() if n in asked}), strict=True))
    except Exception as error:
        raise ExportError(
            f"{path.name}: onnxruntime fails where eager does not: {str(error).splitlines()[0]}"
        ) from error


def _array(tensor: torch.Tensor) -> Any:
    return tensor.detach().contiguous().numpy()
