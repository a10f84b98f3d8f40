"""A function in a zip for a serverless platform: the package, the C library and a handler, without PyTorch and NumPy.

    python examples/forces/export.py forces.pt2
    python examples/cold_start/build.py forces.pt2 function.zip
    unzip -q function.zip -d function
    python -S function/handler.py '[[0, 0, 0], [1.1, 0, 0], [0, 1.2, 0.1]]'

The library's files come from the installed ``aot_backward_native``. ``pip install --target`` puts the same files into a
folder.
"""

import sys
import zipfile
from pathlib import Path

import aot_backward_native

HERE = Path(__file__).parent


def main(package: str, out: str) -> None:
    library = Path(aot_backward_native.__file__).parent
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(HERE / "handler.py", "handler.py")
        archive.write(package, "forces.pt2")
        for file in sorted(library.rglob("*")):
            if file.suffix in (".py", ".so"):
                archive.write(file, f"aot_backward_native/{file.relative_to(library)}")
    print(f"wrote {out}: {Path(out).stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["forces.pt2", "function.zip"]))
