"""One engine from a checked config: the only place that puts scheduler, inbox and log together."""

from collections.abc import Callable

from policies.config.runconfig import RunConfig
from policies.core.engine.engine import Engine
from policies.core.engine.runlog import Lines, RequestRecord, RunLog
from policies.core.engine.scheduler import Scheduler
from policies.core.models.shape import ModelShape
from policies.core.seam.inbox import Inbox


def assemble(
    config: RunConfig,
    model: ModelShape,
    inbox: Inbox,
    batches: Lines | None = None,
    on_ended: Callable[[RequestRecord], object] = lambda record: None,
    handovers: Lines | None = None,
) -> Engine:
    """An engine for `config`, whose `cache.num_blocks` must be set, and `model`, its context cut to what the
    workload allows.

    Its batches become lines of `batches` (None: only totals are kept), its requests' records go to `on_ended`
    as they end. Raises `InputError` when policy, model and cache do not go together.
    """
    scheduler = Scheduler(
        config.policy, model, config.scheduler, config.cache, config.exit, config.role, config.speculation
    )
    return Engine(scheduler, inbox, RunLog(batches, on_ended, handovers))
