"""How every picture looks: colours, line styles, text sizes, and the one place where a figure is opened and
saved."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from policies.core.errors import InputError
from results.files import user_file
from results.identity import policy_order

POLICY_COLORS = {"atomic": "#6b7280", "split": "#d97706", "mixed": "#0f766e", "wcpb": "#be123c",
                 "slo": "#4338ca"}  # fmt: skip
OTHER_COLORS = ("#7c3aed", "#0369a1", "#65a30d", "#a16207", "#9d174d")
REQUEST_COLORS = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#edc948", "#76b7b2", "#ff9da7", "#9c755f",
    "#6a51a3", "#a9b84f",
)  # fmt: skip
MOST_INCHES = 400.0
"""A higher picture has more pixels than a PNG of Agg's can."""
INK, MUTED, FAINT, OBJECTIVE = "#1f2937", "#6b7280", "#e5e7eb", "#16a34a"

RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9ca3af",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": "#4b5563",
    "ytick.color": "#4b5563",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "hatch.linewidth": 0.7,
    "text.parse_math": False,  # a dollar in the name of a trace is a dollar
}


@contextmanager
def picture(path: Path, width: float, height: float, dpi: int = 130) -> Iterator[Figure]:
    """A figure of `width` x `height` inches, saved as a PNG to `path`, whole, when the block ends without an
    error. Raises `InputError` or `WriteError` when it cannot be.

    Uses the Agg canvas and no global state; the same data gives the same bytes with the same matplotlib.
    """
    if height > MOST_INCHES:
        raise InputError(f"{path}: too many runs for one picture, it would be {height:.0f} inches high")
    with rc_context(RC), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.filterwarnings("ignore", message="Glyph")  # of a name in letters that the font lacks
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        with user_file(path) as draft:
            figure.savefig(draft, dpi=dpi, format="png", metadata={"Software": None})


def policy_styles(labels: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and line style of every policy label: a policy's own colour; its variants with options are
    dashed."""
    styles: dict[str, tuple[str, str]] = {}
    num_others = 0
    for label in sorted(set(labels), key=policy_order):
        name = label.split(" ", 1)[0]
        color = POLICY_COLORS.get(name)
        if color is None:
            color = OTHER_COLORS[num_others % len(OTHER_COLORS)]
            num_others += 1
        num_same = sum(other.split(" ", 1)[0] == name for other in styles)
        styles[label] = (color, ("-", "--", ":", "-.")[num_same % 4])
    return styles


def log_scales(axes: Axes, x: bool = True, y: bool = False) -> None:
    """Make the axes asked for logarithmic, with plain numbers, short ones, at 1, 2 and 5 of a decade: 500,
    1k, 2k."""
    for is_wanted, axis, scale in ((x, axes.xaxis, axes.set_xscale), (y, axes.yaxis, axes.set_yscale)):
        if is_wanted:
            scale("log")
            axis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0), numticks=12))
            axis.set_major_formatter(
                FuncFormatter(lambda value, _: f"{value:.12g}" if value < 1000 else f"{value / 1000:,.12g}k")
            )
            axis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="minor", color=MUTED, length=2)


def agreement_axes(axes: Axes, low: float, high: float) -> None:
    """One logarithmic scale from `low` to `high` on both axes, and the line on which two sides agree."""
    log_scales(axes, y=True)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.plot((low, high), (low, high), color=INK, lw=0.8)
    axes.set_aspect("equal")


def width_under(place: int, num_lines: int) -> float:
    """Line width of the line at `place` of several drawn over one another: earlier ones are wider and stay
    visible below."""
    return 1.6 + 0.8 * (num_lines - 1 - place)


def say_nothing_to_show(axes: Axes, text: str) -> None:
    """Replace an empty panel's frame by one quiet sentence that says why it is empty."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=MUTED, wrap=True)
