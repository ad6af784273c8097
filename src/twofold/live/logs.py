"""One log format for every process: `HH:MM:SS name level message`, one line each."""

from __future__ import annotations

import logging
import re
import sys
import time
from typing import Final

_NAME_WIDTH: Final = 10
_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_LINE: Final = re.compile(rf"^\d\d:\d\d:\d\d (\S+) +({'|'.join(_LEVELS)}) +(.*)$")
_NAME_COLOURS: Final = (36, 32, 35, 34, 33, 96, 92, 95)
_LEVEL_COLOURS: Final = {"warning": 33, "error": 31, "critical": 31}


class _Formatter(logging.Formatter):
    """Writes each line of a record, tracebacks included, as a line of the format."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        level = record.levelname.lower()
        return "\n".join(_join(clock, self._name, level, line) for line in text.splitlines())


def set_up_logs(name: str, level: int = logging.INFO) -> None:
    """Send this process's logs to stderr, as lines of process `name`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(name))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def log_line(name: str, level: str, message: str) -> str:
    """A line of the format, as of now."""
    return _join(time.strftime("%H:%M:%S"), name, level, message)


def adopt(name: str, line: str) -> str:
    """`line`, which process `name` wrote, in the format: as it is, or with what is missing."""
    return line if _LINE.match(line) else log_line(name, "info", line)


def message_of(line: str) -> str:
    """The message of a line of the format; other lines are messages as they are."""
    found = _LINE.match(line)
    return found.group(3) if found else line


def coloured(line: str) -> str:
    """A line of the format for a terminal: a colour for its name, and for what is wrong."""
    found = _LINE.match(line)
    if not found:
        return line
    name, level, message = found.groups()
    # A name keeps its colour from run to run, which `hash` would not give.
    name_colour = _NAME_COLOURS[sum(name.encode()) % len(_NAME_COLOURS)]
    shown = f"\x1b[{name_colour}m{name:<{_NAME_WIDTH}}\x1b[0m"
    if level in _LEVEL_COLOURS:
        level = f"\x1b[{_LEVEL_COLOURS[level]}m{level:<7}\x1b[0m"
    return f"\x1b[2m{line[:8]}\x1b[0m {shown} {level:<7} {message}"


def _join(clock: str, name: str, level: str, message: str) -> str:
    return f"{clock} {name:<{_NAME_WIDTH}} {level:<7} {message}"
