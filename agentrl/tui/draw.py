"""Bars, sparklines, columns and times as rich Text. Only the sixteen colours that every theme has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.text import Text

_BARS = " ▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"

GOOD, FAIR, BAD, DIM, STRONG = "green", "yellow", "bold red", "dim", "bold"

Cell = str | Text


def took(seconds: float) -> str:
    """0.4 s as `0.4s`, 75 s as `1m15`, 2 h as `2h00`."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}"
    return f"{minutes // 60}h{minutes % 60:02}"


def count(number: float) -> str:
    """At most five cells: 950, 9.5k, 95k, 1.2M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            short = number / size
            return f"{short:.1f}{unit}" if short < 9.95 else f"{short:.0f}{unit}"
    return f"{number:.0f}"


def counted(number: int, what: str) -> str:
    """1 turn, 2 turns."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def out_of(part: int, whole: int) -> str:
    """As wide for every part, so that columns stay where they are."""
    return f"{part:>{len(str(whole))}}/{whole}"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def level(share: float, *, fair: float, bad: float) -> str:
    """The colour of a figure that is bad when it is high."""
    return BAD if share >= bad else FAIR if share >= fair else GOOD


def bar(share: float, width: int, style: str = GOOD) -> Text:
    """`width` cells, filled to the eighth of a cell."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    drawn = "█" * full + (_EIGHTHS[part] if part else "")
    return Text.assemble((drawn, style), ("·" * (width - cell_len(drawn)), DIM))


def ticks(done: int, whole: int, width: int, style: str = GOOD) -> Text:
    """One block each where they fit, else a bar."""
    if whole > width:
        return bar(done / whole, width, style)
    return Text.assemble(("■" * min(done, whole), style), ("□" * max(0, whole - done), DIM))


def spark(values: Sequence[float], width: int, *, top: float | None = None, style: str = "cyan") -> Text:
    """The newest `width` values, oldest first. top: what a full bar means; default: the largest."""
    shown = list(values)[-width:] if width > 0 else []
    highest = top if top is not None else max(shown, default=0.0)
    marks = (_BARS[max(1, round(8 * min(1.0, v / highest)))] if highest > 0 else _BARS[1] for v in shown)
    return Text("".join(marks), style=style)


def fit(cell: Cell, width: int, align: str = "<") -> Text:
    """Exactly `width` cells; what is too long ends in `…`."""
    return Text.assemble(*_sized(cell, width, align))


def _sized(cell: Cell, width: int, align: str) -> tuple[Cell, Cell]:
    """The pieces of it: plain ones stay plain, which is cheaper."""
    wide = _cells(cell)
    if wide > width:
        text = cell.copy() if isinstance(cell, Text) else Text(cell)
        text.truncate(max(0, width), overflow="ellipsis")
        return text, ""
    space = " " * (width - wide)
    return (space, cell) if align == ">" else (cell, space)


def line(*parts: Cell, gap: str = "  ") -> Text:
    """Parts side by side; empty ones leave no gap."""
    shown = [part if isinstance(part, Text) else Text(part) for part in parts]
    return Text(gap).join(part for part in shown if part.plain)


def ends(left: Cell, right: Cell, width: int) -> Text:
    """One at each edge; the left one gives way."""
    end = right if isinstance(right, Text) else Text(right)
    return Text.assemble(fit(left, max(0, width - end.cell_len - 1)), " ", end)


def columns(rows: Iterable[Sequence[Cell]], names: Sequence[str], width: int) -> list[Text]:
    """A heading and the rows. A name that begins with `>` is set to the right; else the last column takes what is left;
    columns that find no room are left out, the last ones first."""
    table = [tuple(row) for row in rows]
    aligns = [">" if name.startswith(">") else "<" for name in names]
    heads: list[Cell] = [Text(name.removeprefix(">"), style=DIM) for name in names]
    widths = [max([_cells(heads[i]), *(_cells(row[i]) for row in table)]) for i in range(len(names))]
    kept, used = 0, 0
    for wide in widths:
        if kept and used + 1 + min(wide, 6) > width:
            break
        kept, used = kept + 1, used + wide + (1 if kept else 0)
    last = kept - 1
    left, own, align = max(0, width - sum(widths[:last]) - last), widths[last], aligns[last]
    widths[last], aligns[last] = left, "<"
    rows = [(*row[:last], fit(row[last], min(own, left), align)) for row in [tuple(heads), *table]]
    return [_row(row, widths, aligns) for row in rows]


def _row(cells: Sequence[Cell], widths: Sequence[int], aligns: Sequence[str]) -> Text:
    pieces: list[Cell] = []
    for cell, width, align in zip(cells, widths, aligns, strict=False):
        pieces += _sized(cell, width, align)
        pieces.append(" ")
    return Text.assemble(*pieces[:-1])


def _cells(cell: Cell) -> int:
    return cell.cell_len if isinstance(cell, Text) else cell_len(cell)
