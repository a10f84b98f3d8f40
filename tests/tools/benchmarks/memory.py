"""Peak memory of a fresh process that makes N steps: the kernel's high-water mark of the process and of its largest
child.

A child is a compiler or one of Inductor's workers. ``compile, cold`` starts with an empty cache. The activations of the
model (``programs.deep``) need more memory than its parameters.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from . import processes, programs
from .report import Result

TITLE = "peak memory of a fresh process, MB"
STEPS, ROWS = 20, 16

_SCRIPT = """
import gc, json, resource, sys
from pathlib import Path
peer, name, package, steps, rows = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
import torch
gradients = []
if peer != "import":
    torch.manual_seed(1)
    if peer in ("module", "grad"):
        import aot_backward_runtime
        loaded = aot_backward_runtime.load(package)
        x = torch.randn(rows, 256) if name == "wide" else torch.randn(rows, 64, 128)
        if peer == "module":
            model = loaded.module()
            run = lambda: model(x).square().mean()
        else:
            f = loaded.grad()
    else:
        from tests.tools.benchmarks import programs
        model = programs.make(name)
        (x,) = programs.inputs(name, rows)
        run = lambda: model(x).square().mean()
        if peer.startswith("compile"):
            run = torch.compile(run, dynamic=False)
    for _ in range(steps):
        if peer == "grad":
            value, gradients = f(x)
            gradients = list(gradients.values())
        else:
            for p in model.parameters():
                p.grad = None
            run().backward()
            gradients = [p.grad for p in model.parameters()]
norm = float(torch.stack([g.double().norm() for g in gradients]).norm()) if gradients else 0.0
own = next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM"))
child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps({"own": 1024 * own, "child": 1024 * child, "norm": norm}))
"""


def measure(quick: bool, threads: list[int]) -> Result:
    name = "wide" if quick else "deep"
    package = programs.exported(name, [ROWS])
    columns = ["model", "threads", "peer", "own", "largest child", "own over import torch", "that against eager"]
    result = Result("memory", f"{TITLE}, {STEPS} steps", columns)
    peers = ["import", "eager", "module", "grad"] + ([] if quick else ["compile, warm", "compile, cold"])
    for count in threads:
        found: dict[str, dict[str, float]] = {}
        with tempfile.TemporaryDirectory() as empty:
            # The first run warms the cache; the second run replaces it
            for peer in ["compile, warm", *peers] if not quick else peers:
                more = {"TORCHINDUCTOR_CACHE_DIR": str(Path(empty))} if peer == "compile, cold" else {}
                _, found[peer] = processes.run(_SCRIPT, peer, name, package, STEPS, ROWS, threads=count, **more)
        for peer in peers:
            if peer != "import" and abs(found[peer]["norm"] / found["eager"]["norm"] - 1) > 1e-3:
                raise RuntimeError(
                    f"{peer}: expected gradients of norm {found['eager']['norm']}, got {found[peer]['norm']}"
                )
        base = found["import"]["own"]
        for peer in peers:
            own, child = found[peer]["own"], found[peer]["child"]
            ratio = "-" if peer == "import" else f"{(own - base) / (found['eager']['own'] - base):.2f}"
            shown = [f"{own / 1e6:.0f}", f"{child / 1e6:.0f}", f"{(own - base) / 1e6:.0f}", ratio]
            result.rows.append([name, str(count), peer, *shown])
            result.data.append({"model": name, "threads": count, "peer": peer, "own_bytes": own, "child_bytes": child})
    return result
