"""The command line's desk, for the commands of the studies."""

from tests.cli.conftest import desk, environment, farspan, here, run, variables

__all__ = ["desk", "environment", "farspan", "here", "run", "variables"]
