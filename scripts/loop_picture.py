"""Draws docs/loop.svg: `python scripts/loop_picture.py`. Its own background, so that it reads in light and in dark."""

from __future__ import annotations

from html import escape
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "loop.svg"
WIDTH, HEIGHT = 960, 460
SCHEDULER = "admits groups · places attempts by price · cuts fresh batches · orders publication · keeps the ledger"

LIGHT = {"paper": "#fbfaf7", "box": "#ffffff", "edge": "#c9c4b8", "ink": "#24211c", "faint": "#6b665c", "go": "#0b6e74"}
DARK = {"paper": "#16181b", "box": "#1f2327", "edge": "#434a52", "ink": "#e8e6e1", "faint": "#a2a8ae", "go": "#5cc7cd"}


def style(colours: dict[str, str]) -> str:
    c = colours
    return (
        f".paper{{fill:{c['paper']}}} .box{{fill:{c['box']};stroke:{c['edge']};stroke-width:1.5}}"
        f" .ink{{fill:{c['ink']}}} .faint{{fill:{c['faint']}}} .full{{fill:{c['go']}}}"
        f" .empty{{fill:none;stroke:{c['edge']}}} .head{{fill:{c['go']}}}"
        f" .go{{fill:none;stroke:{c['go']};stroke-width:2}}"
        f" .order{{fill:none;stroke:{c['faint']};stroke-width:1;stroke-dasharray:3 4}}"
    )


def text(
    x: float, y: float, words: str, *, kind: str = "faint", size: int = 13, bold: bool = False, at: str = "start"
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text class="{kind}" x="{x}" y="{y}" font-size="{size}" text-anchor="{at}"{weight}>{escape(words)}</text>'


def box(x: int, y: int, width: int, height: int, title: str, *lines: str) -> list[str]:
    return [
        f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>',
        text(x + 14, y + 25, title, kind="ink", size=16, bold=True),
        *(text(x + 14, y + 46 + 19 * row, line) for row, line in enumerate(lines)),
    ]


def arrow(path: str) -> str:
    return f'<path class="go" d="{path}" marker-end="url(#head)"/>'


def order(path: str) -> str:
    return f'<path class="order" d="{path}"/>'


def squares(x: int, y: int, done: int, of: int = 8) -> list[str]:
    """A group: one square for each sibling, full where it has ended."""
    return [
        f'<rect class="{"full" if i < done else "empty"}" x="{x + 17 * i}" y="{y}" width="12" height="12" rx="2"/>'
        for i in range(of)
    ]


def drawing() -> list[str]:
    return [
        *box(24, 22, 912, 66, "scheduler", SCHEDULER),
        text(922, 47, "a pure function of events", at="end"),
        *(order(f"M {x} 88 V 130") for x in (104, 384, 649, 865)),
        text(396, 114, "orders down, facts up"),
        *box(24, 130, 160, 124, "engines", "e0  serves v7", "e1  swaps v6 → v7", "while e0 goes on"),
        *box(284, 130, 200, 124, "attempts"),
        *(part for row, done in enumerate((6, 3, 1)) for part in squares(300, 168 + 20 * row, done)),
        text(298, 241, "groups of siblings"),
        *box(574, 130, 150, 124, "bank"),
        *(part for row in range(2) for part in squares(585, 168 + 20 * row, 8)),
        text(588, 222, "whole groups, in"),
        text(588, 241, "completion order"),
        *box(794, 130, 142, 124, "trainer", "one step:", "v7 → v8", "(age ≤ K)"),
        arrow("M 284 172 H 192"),
        text(238, 163, "token ids", at="middle"),
        arrow("M 184 212 H 276"),
        text(234, 231, "ids, logprobs,", at="middle"),
        text(234, 248, "version", at="middle"),
        arrow("M 484 186 H 566"),
        text(528, 177, "graded,", at="middle"),
        text(528, 205, "durable", at="middle"),
        arrow("M 724 186 H 786"),
        text(757, 177, "batch", at="middle"),
        *box(284, 318, 200, 88, "sandboxes", "five lanes,", "each with its own CPUs"),
        arrow("M 356 254 V 310"),
        text(348, 288, "command", at="end"),
        arrow("M 412 318 V 262"),
        text(420, 288, "output"),
        *box(
            574,
            318,
            306,
            88,
            "journal",
            "turns and trajectories are on disk before",
            "they count; replayed events resume the run",
        ),
        order("M 484 240 C 530 252 540 300 574 344"),
        order("M 724 240 C 760 262 760 290 760 318"),
        arrow("M 908 254 V 420 Q 908 438 890 438 H 122 Q 104 438 104 420 V 262"),
        text(
            506,
            430,
            "weights v8: complete on disk, staged while engines serve, swapped one engine at a time",
            at="middle",
        ),
    ]


def picture(light: dict[str, str] = LIGHT, dark: dict[str, str] = DARK) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img"'
            ' font-family="ui-sans-serif, system-ui, Segoe UI, Helvetica, Arial, sans-serif"'
            ' aria-label="The loop: engines generate, attempts act in sandboxes, whole groups are banked, the trainer'
            ' takes a fresh batch, and its new weights go back to the engines one at a time.">',
            f"<style>{style(light)} @media (prefers-color-scheme: dark) {{ {style(dark)} }}</style>",
            '<defs><marker id="head" viewBox="0 0 10 10" refX="6" refY="5" markerWidth="7" markerHeight="7"'
            ' orient="auto"><path class="head" d="M 0 1 L 9 5 L 0 9 z"/></marker></defs>',
            f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="12"/>',
            *drawing(),
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(picture())
