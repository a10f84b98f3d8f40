"""Matrix products in a generated wrapper: by MKL or by oneDNN, as the processor that runs them is faster
(``products.h``)."""

from __future__ import annotations

import re
from pathlib import Path

VARIABLE = "AOT_BACKWARD_PRODUCTS"
"""The environment variable that names the library; code that chooses has it as text."""
LEAST_LOOP_WEIGHT = 2**17
"""Numbers in the right operand from which on a product of 4 to 127 rows in a loop may be oneDNN's."""

_HEADER = Path(__file__).with_name("products.h")
_CALL = re.compile(r"AOTI_TORCH_ERROR_CODE_CHECK\(aoti_torch_cpu_mm_out\((\w+), (.*)\)\);")
_PRODUCT = re.compile(
    r"matrix_product\((\w+, .*?(?:, (\w+)|reinterpret_tensor_wrapper\((\w+), 2, \w+, \w+, \d+L\)\)))\);$", re.MULTILINE
)
_DEFINITION = re.compile(r"\s*(?:auto|RAIIAtenTensorHandle) (\w*buf\d+)\b")
_OWNS_MEMORY = re.compile(
    r"\s*RAIIAtenTensorHandle (\w+)\(\1_handle\);|\s*auto \w+ = .*(?:std::move\((?P<moved>\w+)\)|\b(?P<reset>\w+)\.reset\(\));  // reuse"
)
_LOOP = re.compile(r"^( *)while \(1\) \{\n(.*?)^\1\}\n", re.MULTILINE | re.DOTALL)
_INPUT = re.compile(r"aoti_torch_assign_tensors_out\((.*), &(\w+)_handle\)\);$", re.MULTILINE)
_CHANGES = re.compile(r"^ *(?:auto |RAIIAtenTensorHandle )?(\w+)(?: = |\()", re.MULTILINE)
_NAMESPACE = "namespace torch::aot_inductor {"


def source(wrapper: str, least: int) -> str:
    """Return ``wrapper`` with its products in the form that chooses, from ``least`` multiplications on.

    A product by oneDNN is a new tensor in the place of the one that Inductor allocated for it. So it must own its
    memory: the parts of a concatenation, which Inductor also fills by products, do not.
    """
    before, namespace, after = wrapper.partition(_NAMESPACE)
    if not namespace:
        return wrapper
    lines, owning = [], set[str]()
    for line in after.split("\n"):
        if definition := _DEFINITION.match(line):
            memory = _OWNS_MEMORY.match(line)
            reused = memory and (memory["moved"] or memory["reset"])
            (owning.add if memory and (not reused or reused in owning) else owning.discard)(definition[1])
        call = _CALL.search(line)
        lines.append(
            line.replace(call[0], f"matrix_product({call[1]}, {call[2]});") if call and call[1] in owning else line
        )
    text = _LOOP.sub(_with_packed_weights, "\n".join(lines))
    header = (
        _HEADER.read_text().replace("LEAST_PRODUCT", str(least)).replace("LEAST_LOOP_WEIGHT", str(LEAST_LOOP_WEIGHT))
    )
    return f"{before}{header}{namespace}{text}"


def _with_packed_weights(loop: re.Match[str]) -> str:
    """Return a loop in which each product with an operand that no step changes keeps what oneDNN needs of it."""
    indent, body = loop.groups()
    changing = set(_CHANGES.findall(body))
    constant = {name for value, name in _INPUT.findall(body) if changing.isdisjoint(re.findall(r"\w+", value))}
    names: list[str] = []

    def kept(product: re.Match[str]) -> str:
        arguments, *operands = product.groups("")
        if not constant.intersection(operands):
            return product[0]
        names.append(f"product_{len(names)}")
        return f"{names[-1]}({arguments});"

    text = _PRODUCT.sub(kept, body)
    return (
        f"{indent}{{ {''.join(f'LoopProduct {n}; ' for n in names)}while (1) {{\n{text}{indent}}} }}\n"
        if names
        else loop[0]
    )
