"""The few shapes that the figures of this folder are made of."""

from html import escape

FONT = 'font-family="sans-serif" font-size="12" fill="#222"'
PALETTE = ("#3367d6", "#f0a030", "#2e9e5b", "#c2477f", "#7a5bc7", "#5aa9c9")


def rectangle(
    x: float, y: float, width: float, height: float, fill: str, label: str = "", ink: str = "#fff"
) -> str:
    """A filled bar with an optional label in its middle."""
    bar = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" '
        'stroke="#fff"/>'
    )
    if not label:
        return bar
    return bar + text(x + width / 2, y + height / 2 + 4, label, anchor="middle", fill=ink)


def text(
    x: float, y: float, words: str, *, anchor: str = "start", bold: bool = False, fill: str = "#222"
) -> str:
    """A line of text; ``y`` is its baseline."""
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}"{weight}>'
        f"{escape(words)}</text>"
    )


def line(x: float, y: float, to_x: float, to_y: float) -> str:
    """A thin dashed line."""
    return (
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="#666" '
        'stroke-dasharray="4 3"/>'
    )


def picture(width: float, height: float, title: str, shapes: list[str]) -> str:
    """A whole SVG file on a white ground."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" {FONT}>'
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, *shapes, "</svg>\n"])
