"""What `farspan reproduce published` says, kept with the commit that said it.

    python benchmarks/published.py [--name NAME]        # writes results/published/NAME.json

The first of these files, `blind`, is of the first time that any of the runs was priced.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "published"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default="now", help="of the file (default: now)")
    given = parser.parse_args()
    words = [sys.executable, "-m", "farspan", "reproduce", "published", "--json"]
    answer = json.loads(
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=300).stdout
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
    )
    RESULTS.mkdir(parents=True, exist_ok=True)
    kept = {"commit": commit.stdout.strip(), **answer}
    (RESULTS / f"{given.name}.json").write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps(kept["scores"], indent=1))


if __name__ == "__main__":
    main()
