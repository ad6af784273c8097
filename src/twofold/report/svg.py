"""Small pieces of SVG and HTML: escaped text, elements, scales, axes."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

# Characters that neither HTML nor XML lets pass, escaped or not.
_FORBIDDEN: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_STEPS: Final = (1, 2, 2.5, 5, 10)
_GLYPH: Final = 7.0
"""Mean width of a glyph in the charts' text, in the charts' units."""


def esc(text: object) -> str:
    """Text that is safe between tags and inside double quotes."""
    return html.escape(_FORBIDDEN.sub("\ufffd", str(text)), quote=True)


def tag(name: str, *content: str, **attributes: object) -> str:
    """An element. `content` is markup already; attribute values are escaped, None left out.

    `class_` becomes class, other underscores hyphens.
    """
    parts = [name]
    for key, value in attributes.items():
        if value is not None:
            shown = coord(value) if isinstance(value, float) else esc(value)
            parts.append(f'{key.rstrip("_").replace("_", "-")}="{shown}"')
    inner = "".join(content)
    opening = " ".join(parts)
    return f"<{opening}>{inner}</{name}>" if inner or name in _PAIRED else f"<{opening}/>"


_PAIRED: Final = frozenset({"div", "span", "td", "th", "p", "section", "svg", "g", "text"})


def text(words: object, x: float, y: float, **attributes: object) -> str:
    """A text element at a place."""
    return tag("text", esc(words), x=float(x), y=float(y), **attributes)


def coord(value: float) -> str:
    """A coordinate to a hundredth, as short as it gets."""
    shown = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if shown == "-0" else shown


def width_of(words: str, *, bold: bool = False) -> float:
    """About how wide `words` are in a chart, rather too much than too little."""
    return len(words) * _GLYPH * (1.16 if bold else 1.0)


class Scale(NamedTuple):
    """Maps values between `low` and `high` to places between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The place of `value`."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values from the last one not above `low` to the first one not below `high`."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * s for s in _STEPS if power * s >= rough * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


class Plot(NamedTuple):
    """The inner area of a chart."""

    x: Scale
    y: Scale

    def frame(
        self,
        x_ticks: Sequence[tuple[float, str]],
        y_ticks: Sequence[tuple[float, str]],
        x_name: str,
        y_name: str,
    ) -> str:
        """Grid lines, ticks with their labels, and the names of both axes."""
        left, right = self.x.start, self.x.end
        bottom, top = self.y.start, self.y.end
        parts: list[str] = []
        for value, label in y_ticks:
            y = self.y.at(value)
            parts.append(tag("line", class_="grid", x1=left, x2=right, y1=y, y2=y))
            parts.append(text(label, left - 8, y + 4, class_="tick", text_anchor="end"))
        for value, label in x_ticks:
            x = self.x.at(value)
            parts.append(tag("line", class_="axis", x1=x, x2=x, y1=bottom, y2=bottom + 4))
            parts.append(text(label, x, bottom + 18, class_="tick", text_anchor="middle"))
        parts.append(tag("line", class_="axis", x1=left, x2=right, y1=bottom, y2=bottom))
        middle = (left + right) / 2
        parts.append(text(x_name, middle, bottom + 38, class_="name", text_anchor="middle"))
        parts.append(text(y_name, left - 40, top - 12, class_="name"))
        return "".join(parts)


def marker(shape: int, x: float, y: float, **attributes: object) -> str:
    """One of six shapes, so that lines are told apart without colour."""
    r = 4.5
    outlines = (
        None,
        [(-r, -r), (r, -r), (r, r), (-r, r)],
        [(0, -r - 1), (r + 1, r), (-r - 1, r)],
        [(0, -r - 1.5), (r + 1.5, 0), (0, r + 1.5), (-r - 1.5, 0)],
        [(0, r + 1), (r + 1, -r), (-r - 1, -r)],
        [(-r - 1, -2), (-2, -r - 1), (r + 1, 2), (2, r + 1)],
    )
    outline = outlines[shape % len(outlines)]
    if outline is None:
        return tag("circle", cx=float(x), cy=float(y), r=r, **attributes)
    points = " ".join(f"{coord(x + dx)},{coord(y + dy)}" for dx, dy in outline)
    return tag("polygon", points=points, **attributes)


def titled(element: str, title: str) -> str:
    """An element with words that show when it is pointed at and that are read aloud."""
    return tag("g", tag("title", esc(title)), element)


def picture(
    ident: str, title: str, description: str, width: float, height: float, body: str
) -> str:
    """An SVG with a title and a description for those who do not see it."""
    return tag(
        "svg",
        tag("title", esc(title), id=f"{ident}-t"),
        tag("desc", esc(description), id=f"{ident}-d"),
        body,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {coord(width)} {coord(height)}",
        role="img",
        aria_labelledby=f"{ident}-t {ident}-d",
    )


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near `wanted`, in their order, at least `gap` apart where there is room."""
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i], i))
    if len(order) > 1:
        gap = min(gap, (high - low) / (len(order) - 1))
    placed = [0.0] * len(wanted)
    floor = low
    for i in order:
        placed[i] = max(floor, min(wanted[i], high))
        floor = placed[i] + gap
    ceiling = high
    for i in reversed(order):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - gap
    return placed
