"""The still of a recording: an SVG of its lanes, for light and dark pages, that a README shows and the page draws a cursor on."""

from __future__ import annotations

from html import escape

from common.recording.events import Lane, Recording, Span

WIDTH, LEFT, ROW, GAP, LETTER = 900, 150, 22, 10, 6.4
STYLE = """
text{font:12px sans-serif;fill:#24292f}.name{font-weight:bold}.dim{fill:#57606a}.rule{stroke:#d0d7de}
.compute{fill:#b6d7f2}.send{fill:#f5c6a5}.wait{fill:#e4e8ec}.file{fill:#c9e8c5}.message{stroke:#bc4c00;stroke-width:1.2;fill:none}
.tip{fill:#bc4c00}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#9198a1}.rule{stroke:#3d444d}.compute{fill:#1f4e79}
.send{fill:#7a4018}.wait{fill:#3d444d}.file{fill:#2b5a2b}.message{stroke:#ffa657}.tip{fill:#ffa657}}
"""
KINDS = {
    "compute": (
        "forward",
        "backward",
        "optimizer step",
        "scaler.step",
        "scaler.update",
        "unscale_",
        "clip_grad_norm_",
        "load batch",
        "scatter",
        "replicate",
        "forward of a part",
        "gather",
        "add up",
    ),
    "wait": ("barrier", "next batch", "init_process_group", "destroy_process_group", "meet", "get"),
    "file": ("save", "load", "fsync", "rename", "replace"),
}


def draw(recording: Recording, label: str, cursor: bool = False) -> str:
    """The SVG.

    :param label: what it shows, for those who do not see it
    :param cursor: whether to draw a line, ``class="cursor"``, that a page moves
    """
    tops, height = {}, 4
    for lane in recording.lanes:
        tops[lane.name] = height
        height += ROW * (1 + max((span.depth for span in lane.spans), default=0)) + GAP
    scale = (WIDTH - LEFT - 8) / recording.seconds
    parts = [_lane(lane, tops[lane.name], scale) for lane in recording.lanes]
    for message in recording.messages:
        start, end = (tops.get(f"{name}, messages") for name in (message.sender, message.receiver))
        if start is not None and end is not None:
            down = end > start
            x1, x2 = LEFT + scale * message.start, LEFT + scale * message.end
            y1, y2 = start + (ROW if down else 0), end + (0 if down else ROW)
            parts.append(
                f'<path class="message" d="M{x1:.1f} {y1}L{x2:.1f} {y2}"/><circle class="tip" cx="{x2:.1f}" cy="{y2}" r="2.5"/>'
            )
    ticks = "".join(
        f'<text class="dim" x="{LEFT + scale * moment:.1f}" y="{height + 12}" text-anchor="{anchor}">{_time(moment)}</text>'
        for moment, anchor in ((0.0, "start"), (recording.seconds / 2, "middle"), (recording.seconds, "end"))
    )
    line = f'<line class="cursor" x1="{LEFT}" x2="{LEFT}" y1="0" y2="{height}"/>' if cursor else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height + 18}" role="img" aria-label="{escape(label)}">'
        f"<style>{STYLE}</style>{''.join(parts)}{ticks}{line}</svg>"
    )


def _lane(lane: Lane, top: float, scale: float) -> str:
    name = f'<text class="name" x="0" y="{top + 15}">{escape(lane.name)}</text>'
    rows = 1 + max((span.depth for span in lane.spans), default=0)
    rule = f'<line class="rule" x1="0" x2="{WIDTH}" y1="{top + ROW * rows + 1}" y2="{top + ROW * rows + 1}"/>'
    return name + rule + "".join(_span(span, top + ROW * span.depth, scale) for span in lane.spans)


def _span(span: Span, y: float, scale: float) -> str:
    x, width = LEFT + scale * span.start, max(1.5, scale * (span.end - span.start))
    kind = next((kind for kind, names in KINDS.items() if span.name in names), "send")
    shown = next((text for text in (describe(span), span.name) if LETTER * len(text) + 6 < width), "")
    text = f'<text x="{x + 3:.1f}" y="{y + 15}">{escape(shown)}</text>' if shown else ""
    title = f"<title>{escape(describe(span))}, {_time(span.end - span.start)}</title>"
    return f'<g><rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 2}" rx="2">{title}</rect>{text}</g>'


def describe(span: Span) -> str:
    """The span in a few words."""
    return " ".join(part for part in (span.name, span.note, _size(span.nbytes)) if part)


def _size(nbytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} B" if nbytes else ""


def _time(seconds: float) -> str:
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{1e3 * seconds:.3g} ms"
        if seconds >= 1e-3
        else f"{1e6 * seconds:.0f} µs"
    )
