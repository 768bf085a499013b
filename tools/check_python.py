"""Says which Python is needed when this one is too old; must run on any Python 3."""

import sys

if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(
        "farspan needs Python 3.11, 3.12 or 3.13; {} is {}.{}.\nfix: make demo PYTHON=python3.12".format(
            sys.executable, *sys.version_info[:2]
        )
    )
