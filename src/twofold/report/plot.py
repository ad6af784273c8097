"""A PNG or SVG of a result, drawn with matplotlib where that is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from twofold.metrics.ledger import PHASES
from twofold.report.results import Goal, Plan, Replay, Run
from twofold.report.setups import (
    Row,
    Setup,
    drawn_up_to,
    per_gpu,
    rate_of,
    setups_of,
    shown_runs,
    side_by_side,
)
from twofold.report.words import count, milliseconds, scale, spoken, whole_percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_LINES: Final = 8
_MOST_BARS: Final = 14
_MARKERS: Final = "os^DvPX*"
_DASHES: Final = ("-", "--", ":", "-.", "-", "--", ":", "-.")
_COLOURS: Final = (
    *("#1463c4", "#c2500a", "#1f7a3d", "#8b3bb0"),
    *("#b0235f", "#0b7f86", "#8a6d00", "#5b6475"),
)
_PHASES: Final = {
    "queue": ("#f6e3b0", "///"),
    "recovery": ("#d9a8a0", "///"),
    "tokenise": ("#9ad0d6", ""),
    "prefill_queue": ("#f0b95a", "///"),
    "prefill": ("#3b7ddd", ""),
    "handoff_wait": ("#e8998d", "///"),
    "transfer": ("#b57bd0", ""),
    "decode_queue": ("#c9c46a", "///"),
    "first_step": ("#57b27a", ""),
    "decode": ("#2f8a55", ""),
    "relay": ("#b9c0cc", ""),
    "unattributed": ("#e1e5ec", ""),
}


class PlotError(ValueError):
    """A plot that cannot be made, in one line."""


def check_plot(path: str | Path) -> None:
    """Raise PlotError, before any work is done, for a plot that could not be written."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg"):
        raise PlotError(f"--plot {path}: a name that ends in .png or .svg is right")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlotError(
            "--plot needs matplotlib: pip install 'twofold[plot]' (--html needs nothing)"
        ) from None


def save_plot(path: str | Path, result: Replay | Plan) -> None:
    """Write attainment and goodput against the rate, and phases, to a .png or .svg file.

    Equal results give equal files with the same matplotlib. Raises PlotError and OSError.
    """
    check_plot(path)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    setups = setups_of(shown_runs(result))
    # Fixed salt and no dates: nothing of the moment of writing gets into the file.
    fixed: Any = {
        "svg.hashsalt": "twofold",
        "font.family": "DejaVu Sans",
        "text.parse_math": False,
        "hatch.linewidth": 0.6,
    }
    svg = Path(path).suffix.lower() == ".svg"
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's own matplotlibrc says
        matplotlib.rcParams.update(fixed)
        figure = Figure(figsize=(15, 5.2), dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        _draw(figure, setups, result.goal)
        metadata: dict[str, Any] = {"Date": None} if svg else {"Software": None}
        figure.savefig(path, format="svg" if svg else "png", metadata=metadata)


def _draw(figure: Figure, setups: Sequence[Setup], goal: Goal | None) -> None:
    left, middle, right = figure.subplots(1, 3)
    divide = per_gpu([run for setup in setups for run in setup.runs])
    unit = "requests/s per GPU" if divide else "requests/s"
    _lines(left, setups, divide, [_attainment] * len(setups))
    left.set_ylim(0, 103)
    left.set_ylabel("requests within the SLO, %")
    left.set_title("SLO attainment")
    if goal is not None:
        at = goal.attainment * 100
        left.axhline(at, color="#b3261e", linewidth=1.2, linestyle=(0, (6, 3)))
        left.annotate(
            f"goal {whole_percent(goal.attainment)}", (1, at), (-4, 4), color="#b3261e",
            xycoords=("axes fraction", "data"), textcoords="offset points", ha="right",
        )  # fmt: skip

    def goodput(run: Run) -> float | None:
        return rate_of(run.goodput_rps, run, divide)

    _lines(middle, setups, divide, [goodput] * len(setups))
    middle.set_ylim(bottom=0)
    middle.set_ylabel(f"goodput, {unit}")
    middle.set_title("Goodput")
    for axes in (left, middle):
        axes.set_xlabel(f"offered rate, {unit}")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    if setups:
        lines, names = left.get_legend_handles_labels()
        figure.legend(lines, names, loc="outside lower left", fontsize=9, ncols=4)
    _phases(right, side_by_side(setups, goal), goal)


def _attainment(run: Run) -> float | None:
    return None if run.slo_attainment is None else run.slo_attainment * 100


def _lines(axes: Axes, setups: Sequence[Setup], divide: bool, value: Sequence[Any]) -> None:
    for i, (setup, of) in enumerate(zip(setups, value, strict=True)):
        points = [
            (rate_of(run.offered_rps, run, divide), of(run))
            for run in setup.runs
            if of(run) is not None
        ]
        rest = i >= _MOST_LINES
        more = f"{count(len(setups) - _MOST_LINES, 'set-up')} more"
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color="#b0b7c3" if rest else _COLOURS[i],
            marker="" if rest else _MARKERS[i],
            linestyle="-" if rest else _DASHES[i],
            linewidth=0.8 if rest else 1.8,
            markersize=5,
            zorder=1 if rest else 3,
            label=setup.short if not rest else more if i == _MOST_LINES else "_",
        )


def _phases(axes: Axes, rows: Sequence[Row], goal: Goal | None) -> None:
    shown = [row for row in rows if row.run.phases_ms][:_MOST_BARS][::-1]
    done = [0.0] * len(shown)
    for name in PHASES:
        widths = [_mean(row.run, name) for row in shown]
        if any(widths):
            colour, hatch = _PHASES[name]
            axes.barh(
                range(len(shown)), widths, left=done, height=0.7,
                color=colour, hatch=hatch, edgecolor="#6b5a30" if hatch else colour,
                linewidth=0, label=spoken(name),
            )  # fmt: skip
            done = [a + b for a, b in zip(done, widths, strict=True)]
    end_ms = drawn_up_to(shown, goal) or 1.0
    axes.set_xlim(0, end_ms)
    for i, total in enumerate(done):
        words = f"{'> ' if total > end_ms else ''}{milliseconds(total)}"
        axes.annotate(
            words, (min(total, end_ms), i), (4, -4), textcoords="offset points", fontsize=8
        )
    axes.set_yticks(range(len(shown)), [row.setup.short for row in shown], fontsize=9)
    axes.set_xlabel("mean TTFT, ms (hatched: waiting)")
    at = f", at {scale(shown[0].run.rate_scale)}" if shown else ""
    axes.set_title(f"Mean TTFT by phase{at}")
    axes.spines[["top", "right"]].set_visible(False)
    if shown:
        bars, names = axes.get_legend_handles_labels()
        axes.figure.legend(bars, names, loc="outside right upper", fontsize=9)


def _mean(run: Run, phase: str) -> float:
    found = run.phases_ms.get(phase)
    return (found.mean or 0.0) if found is not None else 0.0
