"""Logging for every process: one handler on stderr, text or JSON lines.

Owns: the format.
Reads: `config.sections`.
Never: logs a key, a prompt or an answer (callers must not pass them).
"""

from __future__ import annotations

import json
import logging
import sys
import time

from oarlock.config.sections import ObservabilityConfig

LEVELS = {"trace": 5, "debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{stamp} {record.levelname.lower():<7} {record.name}: {record.getMessage()}"
        return text + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": round(record.created, 3), "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(config: ObservabilityConfig) -> None:
    """Set level and format of the `oarlock` loggers; other libraries' loggers are left alone. Idempotent."""
    root = logging.getLogger("oarlock")
    root.setLevel(LEVELS[config.log_level])
    root.propagate = False
    root.handlers.clear()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if config.log_json else _Text())
    root.addHandler(handler)
