"""What TensorBoard shows of an experiment: screenshots by a headless browser.

    python benchmarks/tensorboard_view.py runs/demo --out /tmp/screenshots

It starts a TensorBoard of its own on the experiment's directory and has Chromium (`apt-get install chromium`, or any
Chrome: --browser) draw the overlaid arms, their seeds, the bands, the figures and the table of hyperparameters.
`report` must have written `aggregate/`. With more than 40 runs these tabs tick none until runs are filtered, as here by
the address; so they do for a reader.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

CURVES = quote("^(loss/train|sigma/q|logit/max)$")
ARMS = quote("^aggregate/[^/]+$")
TABS = {
    "arms": f"scalars&_smoothingWeight=0&tagFilter={CURVES}&regexInput={ARMS}",
    "seeds": f"scalars&_smoothingWeight=0&tagFilter={CURVES}&regexInput=seed_",
    "bands": f"custom_scalars&_smoothingWeight=0&regexInput={ARMS}",
    "figures": f"images&regexInput={quote('^aggregate$')}",
    "hparams": "hparams",
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextmanager
def tensorboard(directory: Path) -> Iterator[str]:
    """The address of a TensorBoard that has read a directory."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(directory), "--port", str(port)]
    process = subprocess.Popen([*command, "--reload_interval", "5"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    address = f"http://127.0.0.1:{port}/"
    try:
        while not _answers(f"{address}data/runs"):
            if process.poll() is not None:
                raise SystemExit(f"tensorboard ended: {(process.stderr.read() if process.stderr else b'').decode()}")
            time.sleep(1)
        yield address
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    """Whether TensorBoard is up and has read some run."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read().strip() not in (b"", b"[]")
    except OSError:
        return False


def screenshot(browser: str, url: str, path: Path, size: str, seconds: int) -> None:
    """Write what the browser shows of an address after so many seconds of its own time."""
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", f"--window-size={size}", f"--virtual-time-budget={1000 * seconds}"]
        part = path.with_name(f".{path.name}.tmp.png")
        subprocess.run([*command, f"--screenshot={part}", url], check=True, capture_output=True, timeout=600)
    os.replace(part, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="an experiment's directory, or its aggregate/")
    parser.add_argument("--out", type=Path, default=Path("screenshots"))
    parser.add_argument("--tabs", default=",".join(TABS), help=f"of {', '.join(TABS)}")
    parser.add_argument("--size", default="1600,1000", help="of the window")
    parser.add_argument("--seconds", type=int, default=60, help="that a page may take")
    parser.add_argument("--browser", default=next((name for name in BROWSERS if shutil.which(name)), None))
    options = parser.parse_args()
    if options.browser is None:
        raise SystemExit(f"no browser: none of {', '.join(BROWSERS)} is installed; name one by --browser")
    options.out.mkdir(parents=True, exist_ok=True)
    with tensorboard(options.directory) as address:
        for tab in options.tabs.split(","):
            path = options.out / f"{tab}.png"
            screenshot(options.browser, f"{address}#{TABS[tab]}", path, options.size, options.seconds)
            print(path)


if __name__ == "__main__":
    main()
