"""`python -m farspan`, where the `farspan` script is not on the path."""

from farspan.cli.main import main

raise SystemExit(main())
