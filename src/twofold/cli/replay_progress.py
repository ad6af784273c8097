"""What `replay` and `plan` say on stderr as they work: a bar, or lines where it is no terminal."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Bar:
    """A progress bar over stages, each announced with the runs that it is expected to take."""

    def __init__(self) -> None:
        console = Console(file=sys.stderr, soft_wrap=True)
        self._shown = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not self._shown,
        )
        self._task = self._progress.add_task("", total=1)

    def say(self, stage: str, runs: int) -> None:
        """Begin a stage, and name it where there is no bar."""
        if not self._shown:
            print(stage, file=sys.stderr, flush=True)
        self.begin(stage, runs)

    def begin(self, stage: str, runs: int) -> None:
        """Begin a stage of the bar."""
        self._progress.update(self._task, description=stage, total=max(runs, 1), completed=0)

    def tick(self) -> None:
        """One more run is done; a stage that takes more than expected grows."""
        task = self._progress.tasks[0]
        total = max(task.total or 1, task.completed + 1)
        self._progress.update(self._task, total=total, advance=1)

    def note(self, line: str) -> None:
        """A line above the bar."""
        if self._shown:
            self._progress.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
