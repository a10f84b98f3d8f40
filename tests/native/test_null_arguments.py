"""Call every function of the header with NULL in each of its pointers. It must return a status and an error text, or do
nothing. The calls are generated from the header's declarations, so they include new functions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ..support import c_library, golden_files

pytestmark = golden_files.needed
PAIR, STEP = (golden_files.FOLDER / f"{name}.pt2" for name in ("1.0-pair", "1.2-step"))

CALLS = r"""
import ctypes, json, re, sys

header, library, *packages = sys.argv[1:]
c = ctypes.CDLL(library)
c.aotb_error.restype = ctypes.c_char_p
text = re.sub(r"/\*.*?\*/", " ", open(header).read(), flags=re.S)
declared = re.findall(r"^(aotb_status|void|uint32_t|const char \*) ?(aotb_\w+)\(([^)]*)\);", text, flags=re.M)
memory = [ctypes.create_string_buffer(512) for _ in range(8)]  # a zeroed DLTensor, aotb_options, aotb_description ...
outs = [ctypes.c_void_p() for _ in range(8)]
numbers = {"uint32_t": ctypes.c_uint32(1), "int64_t": ctypes.c_int64(0), "uint64_t": ctypes.c_uint64(0), "int": ctypes.c_int(1),
           "double": ctypes.c_double(1), "aotb_part": ctypes.c_int(0)}

def handles(path):
    # The package, and a function of each of its entries.
    package, found = ctypes.c_void_p(), []
    options = (ctypes.c_void_p * 3)(None, None, 1)
    assert c.aotb_open(path.encode(), options, ctypes.byref(package)) == 0, c.aotb_error()
    c.aotb_entry.restype = ctypes.c_char_p
    for number in range(c.aotb_entries(package)):
        function = ctypes.c_void_p()
        assert c.aotb_get(package, c.aotb_entry(package, number), ctypes.byref(function)) == 0, c.aotb_error()
        found.append(function)
    return package, found

def value(kind, name, place, package, function):
    if kind == "aotb_package *":
        return package
    if kind == "aotb_function *":
        return function
    if "**" in kind:
        return ctypes.byref(outs[place])
    if kind == "char *":
        return b"nothing"
    return memory[place] if "*" in kind else numbers[kind]

assert {name for _, name, _ in declared} == set(re.findall(r"\b(aotb_\w+)\(", text)), "a declaration that was not understood"
said = []
for path in packages:
    package, functions = handles(path)
    for result, name, listed in declared:
        call = c[name]
        call.restype = {"void": None, "const char *": ctypes.c_char_p}.get(result, ctypes.c_uint32)
        words = [] if listed == "void" else [re.fullmatch(r"\s*(.*?)(\w+)\s*", each).groups() for each in listed.split(",")]
        kinds = [(kind.replace("const ", "").strip(), word) for kind, word in words]
        pointers = [place for place, (kind, _) in enumerate(kinds) if "*" in kind]
        for function in functions:
            for place in pointers:
                c.aotb_get(package, b"no such entry", ctypes.byref(outs[0]))  # the error before
                given = [None if at == place else value(kind, word, at, package, function) for at, (kind, word) in enumerate(kinds)]
                print(name, kinds[place][1], file=sys.stderr, flush=True)  # what a signal came from
                got = call(*given)
                said.append((name, kinds[place][1], result, got, c.aotb_error().decode()))
            call(*[None if "*" in kind else numbers[kind] for kind, _ in kinds])
print(json.dumps(said, default=str))
"""
MAY_BE_NULL = {("aotb_open", "options"), ("aotb_save", "extra"), ("aotb_resume", "extra"), ("aotb_metadata", "entry")}


def test_null_in_any_argument_is_a_status_or_does_nothing(tmp_path: Path) -> None:
    header = c_library.NATIVE / "include" / "aot_backward.h"
    argv = [
        sys.executable,
        "-c",
        CALLS,
        str(header),
        str(c_library.build() / "libaot_backward.so"),
        str(PAIR),
        str(STEP),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, (done.returncode, done.stderr[-400:])
    said = json.loads(done.stdout)
    assert len({name for name, *_ in said}) >= 25  # aotb_error is not among them: it takes no arguments
    for name, argument, result, got, words in said:
        if (name, argument) in MAY_BE_NULL:
            continue
        if result == "aotb_status":
            assert got != c_library.OK and "no such entry" not in words, (name, argument, got, words)
        elif result != "void":
            assert not got, (name, argument, got)
        if argument in ("function", "package") and result != "void":
            assert (
                words
                == f"{name}: {argument}: expected one that aotb_{'get' if argument == 'function' else 'open'} gave, got NULL"
            )
