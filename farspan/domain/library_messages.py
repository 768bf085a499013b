"""What libraries report on standard error, their control characters as escapes."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from farspan.domain.escapes import escape_controls


class EscapedLogLines(logging.Formatter):
    """Log lines with their control characters as escapes."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))


def escape_library_messages() -> None:
    """Escape what libraries report on standard error, such as pypdf about names in a PDF."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(EscapedLogLines())
    format_warning = warnings.formatwarning

    def format_escaped(*about: Any, **more: Any) -> str:
        return escape_controls(format_warning(*about, **more))

    warnings.formatwarning = format_escaped
