"""A page that headless Chromium opens, and what it answers."""

from __future__ import annotations

import functools
import http.server
import json
import queue
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any


def answer_of(folder: Path, script: str, timeout: float) -> Any:
    """Serve ``folder`` and a page that runs ``script``, a module that assigns what is wanted to ``answer``. Return it.

    A page that raises is a ``RuntimeError``, one without an answer after ``timeout`` seconds a ``TimeoutError``.
    Chromium's own ``--dump-dom`` sometimes prints the page before its scripts are done.
    """
    answers: queue.Queue[Any] = queue.Queue()
    send = 'const send = (value) => fetch("answer", { method: "POST", body: JSON.stringify(value) });'
    script = f"let answer;\n{script}\nawait send({{ answer }});"
    page = f"""<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><body><script>
    {send}
    addEventListener("error", (e) => send({{ error: `${{e.message}}` }}));
    addEventListener("unhandledrejection", (e) => send({{ error: `${{e.reason}}` }}));
    </script><script type="module">{script}</script></body>"""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/":
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def do_POST(self) -> None:
            answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))) as server,
    ):
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        browser = subprocess.Popen(
            ["chromium", *flags, f"http://127.0.0.1:{server.server_port}/"], stderr=subprocess.DEVNULL
        )
        try:
            result = answers.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"Chromium: expected an answer of the page within {timeout:g} s, got none") from None
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()
            thread.join()
    if "error" in result:
        raise RuntimeError(f"Chromium: {result['error']}")
    return result["answer"]
