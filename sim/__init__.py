"""The simulated world: a SimPy device, latency models, sweeps. Never imports torch.

`from sim import simulate, sweep` is a notebook's way in (`sim.notebook`), loaded when it is asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.notebook import simulate, sweep

__all__ = ["simulate", "sweep"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sim import notebook

    return getattr(notebook, name)
