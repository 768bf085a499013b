"""Says which Python is needed when this one is too old; must run on any Python 3."""

import sys

if not (3, 11, 4) <= sys.version_info[:3] < (3, 14):
    sys.exit(
        "farspan needs Python 3.11.4 or newer, up to 3.13; {} is {}.{}.{}.\n"
        "fix: make demo PYTHON=python3.12".format(sys.executable, *sys.version_info[:3])
    )
