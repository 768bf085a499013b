"""Says how much an installation is about to download: `download_size.py '.[train]'`, under
constraints.txt.

Asks pip what it would install, and each file's server how large it is. Files on this machine cost
nothing.
"""

import json
import subprocess
import sys
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def size_of(url: str) -> tuple[int, bool]:
    """Bytes of a file and whether it has to be downloaded; -1 bytes where the server does not
    say."""
    parts = urllib.parse.urlparse(url)
    if parts.scheme == "file":
        path = Path(urllib.request.url2pathname(parts.path))
        return (path.stat().st_size if path.is_file() else 0), False
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, method="HEAD"), timeout=10
        ) as answer:
            return int(answer.headers.get("Content-Length", -1)), True
    except (OSError, ValueError):
        return -1, True


def main() -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--dry-run",
    ]
    command += ["-c", "constraints.txt", "--report", "-", "-e", sys.argv[1]]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr.strip(), file=sys.stderr)
        sys.exit(
            "pip cannot find what farspan needs.\nfix: check the network, then run the same "
            "command again"
        )
    items = [
        item
        for item in json.loads(done.stdout)["install"]
        if "dir_info" not in item["download_info"]
    ]
    with ThreadPoolExecutor(8) as pool:
        sizes = list(pool.map(lambda item: size_of(item["download_info"]["url"]), items))
    download = sum(size for size, remote in sizes if remote and size > 0)
    local = sum(size for size, remote in sizes if not remote)
    unknown = sum(size < 0 for size, _ in sizes)
    text = f"installing {len(items)} packages: {download / 1e6:,.0f} MB to download"
    text += f", {local / 1e6:,.0f} MB from this machine" if local else ""
    print(text + (f", {unknown} packages of unknown size" if unknown else ""), flush=True)


if __name__ == "__main__":
    main()
