"""Matrix products in a generated wrapper: by MKL or by oneDNN, as the processor that runs them is faster (``products.h``)."""

from __future__ import annotations

import re
from pathlib import Path

_HEADER = Path(__file__).with_name("products.h")
_CALL = re.compile(r"AOTI_TORCH_ERROR_CODE_CHECK\(aoti_torch_cpu_mm_out\((buf\d+), (.*)\)\);")
_DEFINITION = re.compile(r"\s*(?:auto|RAIIAtenTensorHandle) (buf\d+)\b")
_OWNS_MEMORY = re.compile(
    r"\s*RAIIAtenTensorHandle (buf\d+)\(\1_handle\);|\s*auto buf\d+ = .*(?:std::move\((?P<moved>buf\d+)\)|(?P<reset>buf\d+)\.reset\(\));  // reuse"
)
_NAMESPACE = "namespace torch::aot_inductor {"


def source(wrapper: str, least: int) -> str:
    """Return ``wrapper`` with its products in the form that chooses, from ``least`` multiplications on.

    A product by oneDNN is a new tensor in the place of the one that Inductor allocated for it. So it must own its memory: the parts of a
    concatenation, which Inductor also fills by products, do not.
    """
    lines, owning = [], set[str]()
    for line in wrapper.split("\n"):
        if definition := _DEFINITION.match(line):
            memory = _OWNS_MEMORY.match(line)
            reused = memory and (memory["moved"] or memory["reset"])
            (owning.add if memory and (not reused or reused in owning) else owning.discard)(definition[1])
        call = _CALL.search(line)
        lines.append(line.replace(call[0], f"matrix_product({call[1]}, {call[2]});") if call and call[1] in owning else line)
    before, namespace, after = "\n".join(lines).partition(_NAMESPACE)
    header = _HEADER.read_text().replace("LEAST_PRODUCT", str(least))
    return f"{before}{header}{namespace}{after}" if namespace else wrapper
