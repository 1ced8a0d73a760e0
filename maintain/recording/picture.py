"""The still of a recording: an SVG of its lanes, for light and dark pages, that a README shows and the page draws a cursor on."""

from __future__ import annotations

from html import escape

from maintain.recording.events import Recording, Span

WIDTH, LEFT, ROW, GAP, LETTER = 900, 150, 22, 10, 6.4
STYLE = """
text{font:12px sans-serif;fill:#24292f}.name{font-weight:bold}.dim{fill:#57606a}.rule{stroke:#d0d7de}
.compute{fill:#b6d7f2}.send{fill:#f5c6a5}.wait{fill:#e4e8ec}.file{fill:#c9e8c5}.message{stroke:#bc4c00;stroke-width:1.2;fill:none}
.tip{fill:#bc4c00}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#9198a1}.rule{stroke:#3d444d}.compute{fill:#1f4e79}
.send{fill:#7a4018}.wait{fill:#3d444d}.file{fill:#2b5a2b}.message{stroke:#ffa657}.tip{fill:#ffa657}}
"""
BYTES = {"MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
TIMES = {"s": 10**6, "ms": 1000, "µs": 1}
KINDS = {  # all others compute
    "send": (
        "isend",
        "irecv",
        "all_reduce",
        "broadcast",
        "all_gather_single",
        "reduce_scatter_single",
        "all-reduce",
        "set",
    ),
    "wait": ("barrier", "next batch", "init_process_group", "destroy_process_group", "meet", "get"),
    "file": ("save", "load", "fsync", "rename", "replace"),
}


def draw(recording: Recording, label: str) -> str:
    """The SVG. A line, ``class="cursor"``, is seen where a page has a style for it.

    :param label: what it shows, for those who do not see it
    """
    scale = (WIDTH - LEFT - 8) / recording.end
    tops, height, parts = {}, 4, []
    for lane in recording.lanes:
        tops[lane.name] = height
        parts.append(f'<text class="name" x="0" y="{height + 15}">{escape(lane.name)}</text>')
        parts += [_span(span, height + ROW * span.depth, scale) for span in lane.spans]
        height += ROW * (1 + max((span.depth for span in lane.spans), default=0))
        parts.append(f'<line class="rule" x1="0" x2="{WIDTH}" y1="{height + 1}" y2="{height + 1}"/>')
        height += GAP
    for message in recording.messages:
        start, end = (tops[f"{name}, messages"] for name in (message.sender, message.receiver))
        x1, x2 = LEFT + scale * message.start, LEFT + scale * message.end
        y1, y2 = (start + ROW, end) if end > start else (start, end + ROW)
        parts.append(
            f'<path class="message" d="M{x1:.1f} {y1}L{x2:.1f} {y2}"/><circle class="tip" cx="{x2:.1f}" cy="{y2}" r="2.5"/>'
        )
    for half, anchor in enumerate(("start", "middle", "end")):
        moment = half * recording.end // 2
        x = LEFT + scale * moment
        parts.append(
            f'<text class="dim" x="{x:.1f}" y="{height + 12}" text-anchor="{anchor}">{_amount(moment, TIMES)}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height + 18}" role="img" aria-label="{escape(label)}">'
        f'<style>{STYLE}</style>{"".join(parts)}<line class="cursor" x1="{LEFT}" x2="{LEFT}" y1="0" y2="{height}"/></svg>'
    )


def _span(span: Span, y: float, scale: float) -> str:
    x, width = LEFT + scale * span.start, max(1.5, scale * (span.end - span.start))
    kind = next((kind for kind, names in KINDS.items() if span.name in names), "compute")
    words = describe(span)
    shown = next((text for text in (words, span.name) if LETTER * len(text) + 6 < width), "")
    text = f'<text x="{x + 3:.1f}" y="{y + 15}">{escape(shown)}</text>' if shown else ""
    title = f"<title>{escape(words)}, {_amount(span.end - span.start, TIMES)}</title>"
    return f'<g><rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 2}" rx="2">{title}</rect>{text}</g>'


def describe(span: Span) -> str:
    """The span in a few words."""
    return " ".join(filter(None, (span.name, span.note, _amount(span.nbytes, BYTES) if span.nbytes else "")))


def _amount(value: int, units: dict[str, int]) -> str:
    for unit, size in units.items():
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return "0"
