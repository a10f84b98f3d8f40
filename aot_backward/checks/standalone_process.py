"""Script that ``standalone.py`` runs in a separate process: it runs an entry on its stored example, without PyTorch. If
native code ends the process, the export goes on. stdin: a pickled request; stdout: a pickled answer; the results' bytes
go to a file."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import aot_backward_native as abn

Placed = tuple[str, tuple[int, ...], int]
"""Dtype, shape, and the offset of the row-major bytes in the file."""


def main() -> None:
    request = pickle.load(sys.stdin.buffer)  # noqa: S301  # from the parent
    try:
        answer: dict[str, Any] = {"results": run(request)}
    except abn.AotBackwardError as error:
        answer = {"error": str(error)}
    pickle.dump(answer, sys.stdout.buffer)


def run(request: dict[str, Any]) -> dict[str, Any]:
    package = abn.load(request["path"], backend="standalone", unchecked=True)
    package.seed(request["seed"])
    entry = getattr(package, request["kind"])(request["entry"])
    if request["mode"]:
        entry.train(request["mode"] == "train")
    entry.use_variant(request["variant"])
    function = entry._function
    inputs, incoming = ([abn.tensor(*t) for t in request[name]] for name in ("inputs", "incoming"))
    with open(request["file"], "wb") as file:  # noqa: PTH123  # pathlib is slow to import

        def put(tensor: Any) -> Placed | None:
            if tensor is None:
                return None
            begin = file.tell()
            file.write(tensor.tobytes())
            return tensor.dtype, tensor.shape, begin

        def states() -> dict[str, Placed | None]:
            return {label: put(function.state(name)) for label, name in request["states"].items()}

        answer: dict[str, Any] = {"before": states() if request["kind"] == "step" else {}}
        if request["kind"] == "step":
            answer["losses"] = [put(function.run(*inputs)[0]) for _ in range(request["steps"])]
        elif request["backward"]:
            answer["outputs"] = list(map(put, function.forward(*inputs)))
            answer["gradients"] = list(map(put, function.backward(*incoming)))
        else:
            results = list(map(put, function.run(*inputs)))
            answer["outputs"], answer["gradients"] = results[: request["outputs"]], results[request["outputs"] :]
        return answer | {"after": states()}


if __name__ == "__main__":
    main()
