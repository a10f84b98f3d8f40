"""Cold exports: seconds from an empty compile cache, with ``tune="none"``, of a module and of a training step, and of
``torch.compile``'s first forward and backward. Each in a process of its own, counted after torch and the library were
imported.
"""

from __future__ import annotations

import tempfile
from typing import Any

from . import processes, real_models
from .report import Result, Target

TITLE = "cold exports at real sizes, seconds"
QUICK = ("mlp",)
# A step's export is at most this much of its module's, a module's of torch.compile's first call
_STEP, _MODULE = 1.2, 0.6

_EXPORT = """
import json, sys, time
import torch, transformers
import aot_backward as ab
from tests.tools.benchmarks import sizes
name, entry, path = sys.argv[1:4]
chosen = {entry: sizes.entries(name)[entry]}
start = time.perf_counter()
ab.export(path, chosen, tune="none")
print(json.dumps({"seconds": time.perf_counter() - start}))
"""

_COMPILE = """
import json, sys, time
import torch, transformers
from tests.tools.benchmarks import real_models, sizes
model, args, classes = real_models.make(sys.argv[1])
loss = sizes.Loss(model)
start = time.perf_counter()
torch.compile(loss, dynamic=False)(*args, classes).backward()
print(json.dumps({"seconds": time.perf_counter() - start}))
"""


def measure(quick: bool, threads: list[int]) -> Result:
    """``threads`` is not used: an export takes all cores."""
    result = Result("exports", TITLE, ["model", "module", "step", "torch.compile", "step/module", "module/compile"])
    for name in QUICK if quick else real_models.MODELS:
        found: dict[str, Any] = {"model": name, "seconds": {}}
        path = processes.package(f"exports-{name}")
        for what in ("module", "step", "compile"):
            with tempfile.TemporaryDirectory() as cache:
                script, arguments = (_COMPILE, (name,)) if what == "compile" else (_EXPORT, (name, what, path))
                caches = {"AOT_BACKWARD_CACHE": cache, "TORCHINDUCTOR_CACHE_DIR": cache}
                found["seconds"][what] = processes.run(script, *arguments, threads=2, **caches)[1]["seconds"]
        module, step, compiled = found["seconds"].values()
        result.rows.append(
            [name, *(f"{s:.1f}" for s in (module, step, compiled)), f"{step / module:.2f}", f"{module / compiled:.2f}"]
        )
        result.data.append(found)
    of_step = max((d["seconds"]["step"] / d["seconds"]["module"], d["model"]) for d in result.data)
    of_module = max((d["seconds"]["module"] / d["seconds"]["compile"], d["model"]) for d in result.data)
    for asked, (most, name), allowed in (
        (f"a step's export at most {_STEP} of its module's", of_step, _STEP),
        (f"a module's export at most {_MODULE} of torch.compile's first call", of_module, _MODULE),
    ):
        result.targets.append(Target(asked, f"{most:.2f} at most ({name})", most <= allowed, f"{most - allowed:.2f}"))
    return result
