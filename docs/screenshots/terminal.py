"""Turns the contents of a terminal into an SVG picture whose text can be selected.

    tmux capture-pane -e -p -t SESSION | python docs/screenshots/terminal.py TITLE > docs/images/NAME.svg

Reads text with the escape sequences of colors (SGR) from the standard input. The dark window is readable on light and
dark pages. Letters are text, at fixed places whatever font is there; curves, bars and frames are drawn, since few fonts
have them in the width of a letter.
"""

import re
import sys
import unicodedata
from collections import defaultdict
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT, SIZE = 8.4, 18, 14  # of a character, in pixels, and of the font
MARGIN, BAR = 14, 30  # around the text, and the height of the window's title
BACKGROUND, TEXT, EDGE, FAINT = "#1a1d24", "#d7dae0", "#454b58", "#949ba8"
COLORS = (
    "#3b4048 #f27983 #98cb7c #e8c274 #74b3f5 #d090ea #62c4cf #d7dae0 "  # black to white
    "#8a919e #ff9aa2 #b3e398 #ffdc94 #98caff #e2adf7 #86e0ea #ffffff"
).split()
# An escape sequence or a control character, or else a letter.
PARTS = re.compile(r"(\x1b\[[0-9;:?]*[A-Za-z]|\x1b[()].|[\x0e\x0f\r])|(.)")
FONT = "'DejaVu Sans Mono', Menlo, Consolas, 'Liberation Mono', monospace"


class Style(NamedTuple):
    color: str = TEXT
    behind: str | None = None
    bold: bool = False
    dim: bool = False
    italic: bool = False
    underlined: bool = False
    reversed: bool = False

    def colors(self):
        """Returns the colors of the letters and of what is behind them."""
        if self.reversed:
            return self.behind or BACKGROUND, self.color
        return (FAINT if self.dim and self.color == TEXT else self.color), self.behind


def color_of(number):
    if number < 16:
        return COLORS[number]
    if number >= 232:
        return "#" + f"{8 + 10 * (number - 232):02x}" * 3
    steps = (0, 95, 135, 175, 215, 255)
    red, rest = divmod(number - 16, 36)
    return "#" + "".join(f"{steps[it]:02x}" for it in (red, *divmod(rest, 6)))


def restyled(style, codes):
    """Returns the style after an escape sequence with these numbers."""
    codes = iter(codes)
    for code in codes:
        if code == 0:
            style = Style()
        elif code in (1, 2, 3, 4, 7):
            name = {1: "bold", 2: "dim", 3: "italic", 4: "underlined", 7: "reversed"}[code]
            style = style._replace(**{name: True})
        elif code == 22:
            style = style._replace(bold=False, dim=False)
        elif code in (23, 24, 27):
            style = style._replace(**{{23: "italic", 24: "underlined", 27: "reversed"}[code]: False})
        elif code in (38, 48):
            if next(codes) == 5:
                color = color_of(next(codes))
            else:
                color = "#" + "".join(f"{next(codes):02x}" for _ in range(3))
            style = style._replace(**{"color" if code == 38 else "behind": color})
        elif code == 39:
            style = style._replace(color=TEXT)
        elif code == 49:
            style = style._replace(behind=None)
        elif 30 <= code <= 37 or 90 <= code <= 97:
            style = style._replace(color=COLORS[code - 30 if code < 40 else code - 82])
        elif 40 <= code <= 47 or 100 <= code <= 107:
            style = style._replace(behind=COLORS[code - 40 if code < 50 else code - 92])
    return style


def cells_of(text):
    """Returns the lines as lists of a letter and its style, without empty lines at the end."""
    lines, style = [], Style()
    for line in text.split("\n"):
        cells = []
        for sequence, letter in PARTS.findall(line):
            if letter:
                cells.append((letter, style))
            elif sequence.endswith("m"):
                style = restyled(style, [int(it or 0) for it in re.split("[;:]", sequence[2:-1])])
        while cells and cells[-1][0] == " " and not cells[-1][1].colors()[1]:
            cells.pop()
        lines.append(cells)
    while lines and not lines[-1]:
        lines.pop()
    return lines


def number(value):
    return f"{value:.1f}".removesuffix(".0")


def box(x, y, width, height):
    return f"M{number(x)} {number(y)}h{number(width)}v{number(height)}h{number(-width)}z"


def drawn(letter, x, y):
    """Returns the areas of a braille pattern, block or piece of a frame as a path; `None` for letters."""
    code = ord(letter)
    if 0x2800 <= code <= 0x28FF:
        places = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))
        dots = [place for bit, place in enumerate(places) if code >> bit & 1]
        corners = ((x + (column + 0.2) * WIDTH / 2, y + (row + 0.2) * HEIGHT / 4) for column, row in dots)
        return "".join(box(*corner, 2.5, 2.7) for corner in corners)
    if 0x2581 <= code <= 0x2588:
        height = HEIGHT * (code - 0x2580) / 8
        return box(x, y + HEIGHT - height, WIDTH, height)
    if 0x2589 <= code <= 0x258F:
        return box(x, y, WIDTH * (0x2590 - code) / 8, HEIGHT)
    if letter in "▀▐":
        return box(x, y, WIDTH, HEIGHT / 2) if letter == "▀" else box(x + WIDTH / 2, y, WIDTH / 2, HEIGHT)
    if 0x2500 <= code <= 0x257F:
        words = unicodedata.name(letter).split()
        thick = 2.4 if "HEAVY" in words else 1.2
        half, middle, centre = thick / 2, x + WIDTH / 2, y + HEIGHT / 2
        path = ""
        if {"LEFT", "HORIZONTAL"} & set(words):
            path += box(x, centre - half, WIDTH / 2 + half, thick)
        if {"RIGHT", "HORIZONTAL"} & set(words):
            path += box(middle - half, centre - half, WIDTH / 2 + half, thick)
        if {"UP", "VERTICAL"} & set(words):
            path += box(middle - half, y, thick, HEIGHT / 2 + half)
        if {"DOWN", "VERTICAL"} & set(words):
            path += box(middle - half, centre - half, thick, HEIGHT / 2 + half)
        return path
    return None


def runs_of(cells):
    """Returns words with single spaces between them and one style, each with its column."""
    runs, after_spaces = [], 2
    for column, (letter, style) in enumerate(cells):
        if letter == " " or drawn(letter, 0, 0) is not None:
            after_spaces += 1
            continue
        if after_spaces < 2 and runs[-1][2] == style:
            runs[-1][1] += " " * after_spaces + letter
        else:
            runs.append([column, letter, style])
        after_spaces = 0
    return runs


def svg(lines, title):
    width = 2 * MARGIN + max(map(len, lines)) * WIDTH
    height = BAR + 2 * MARGIN + len(lines) * HEIGHT
    behind, shapes, texts = defaultdict(str), defaultdict(str), []
    for row, cells in enumerate(lines):
        y = BAR + MARGIN + row * HEIGHT
        for column, (letter, style) in enumerate(cells):
            x = MARGIN + column * WIDTH
            color, back = style.colors()
            if back:
                behind[back] += box(x, y, WIDTH, HEIGHT)
            shapes[color] += drawn(letter, x, y) or ""
        spans = []
        for column, text, style in runs_of(cells):
            color = style.colors()[0]
            look = f' fill="{color}"' if color != TEXT else ""
            look += ' font-weight="bold"' if style.bold else ""
            look += ' font-style="italic"' if style.italic else ""
            look += ' text-decoration="underline"' if style.underlined else ""
            place = f'x="{number(MARGIN + column * WIDTH)}" textLength="{number(len(text) * WIDTH)}"'
            spans.append(f"<tspan {place}{look}>{escape(text, quote=False)}</tspan>")
        if spans:
            texts.append(f'<text y="{y + HEIGHT - 5}">{" ".join(spans)}</text>')
    size = f'width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" font-size="{SIZE}">'
    yield f"<title>{escape(title)}</title>"
    frame = f'x=".5" y=".5" width="{width - 1:.0f}" height="{height - 1}" rx="8"'
    yield f'<rect {frame} fill="{BACKGROUND}" stroke="{EDGE}"/>'
    yield f'<path d="M0 {BAR}h{width:.0f}" stroke="{EDGE}"/>'
    place = f'x="{width / 2:.0f}" y="20" text-anchor="middle"'
    yield f'<text {place} font-size="13" fill="{FAINT}">{escape(title)}</text>'
    for color, path in [*behind.items(), *shapes.items()]:
        if path:
            yield f'<path fill="{color}" d="{path}"/>'
    yield f'<g fill="{TEXT}">'
    yield from texts
    yield "</g>\n</svg>"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.stdin.reconfigure(encoding="utf-8")
    sys.stdout.reconfigure(encoding="utf-8")
    print("\n".join(svg(cells_of(sys.stdin.read()), sys.argv[1])))
