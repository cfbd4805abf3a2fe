"""The simulated host against the real one: a recorded run's own times, batch by batch, make a run as long as
the recorded one."""

import csv
import dataclasses
from pathlib import Path

import pytest

from policies.config.runconfig import load_config
from policies.core.seam.batch import Work
from policies.costs.devices import device_facts
from policies.costs.latency import HostLoop, LatencyModel, Prediction
from policies.costs.modelfile import read_model
from policies.costs.models import DEVICES
from results.find import find_runs
from results.load import Run
from results.rundir import BATCHES, CONFIG
from sim.run import Simulation

PACKS = sorted((Path(__file__).parents[1] / "results" / "reference" / "h200" / "recorded").glob("*.tar.xz"))
RUNS = [
    run
    for run in find_runs(PACKS)[0]
    if run.has_logs
    and run.config["workload"]["kind"] == "preset"
    and not run.summary["graph_captures"]
    and not run.summary["eager_batches"]
]
"""With a log, and arrivals that need no file; a graph captured in the middle, or a batch that runs without
one, is launching time (56 ms), which no log tells apart."""
DEVIATION = 0.03
"""Of the whole run; its worst is a run of many short batches, which the host limits. Most come within
0.003."""


class RecordedTimes(LatencyModel):
    """Batches are asked for in order, and each takes what the batch of the same number took; `launching_ns`
    of its host time is launching."""

    def __init__(self, run: Run, simulation: Simulation, loop: HostLoop, launching_ns: int) -> None:
        super().__init__("recorded", simulation.model, device_facts("h200"), str(run.path), loop)
        self._launching_ns = launching_ns
        self._num_asked = 0
        with open(run.path / BATCHES, newline="", encoding="utf-8") as file:
            self.rows = list(csv.DictReader(file))

    def predict(self, work: Work) -> Prediction:
        row = self.rows[min(self._num_asked, len(self.rows) - 1)]
        self._num_asked += 1
        device_ns = int(row["finished_ns"]) - int(row["started_ns"])
        host_ns = int(row["host_ns"])
        launch_ns = min(self._launching_ns, host_ns)
        return Prediction(
            (0, device_ns, 0, 0, 0, 0), 0, int(row["select_ns"]), host_ns - launch_ns, launch_ns
        )


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.path.name)
def test_a_run_on_recorded_times_is_as_long_as_the_recorded_run(run: Run) -> None:
    """Recorded device times hold the wait for the launch already, so none is added. Who comes by the clock
    comes some microseconds earlier or later, into another batch: batches are counted where requests come when
    others end, rows everywhere."""
    simulation = Simulation.prepare(load_config(run.path / CONFIG))
    loop = dataclasses.replace(read_model(DEVICES / "h200.json").loop, host_spread=0.0)
    latency = RecordedTimes(run, simulation, loop, launching_ns=35_000)
    engine = simulation.engine()
    dataclasses.replace(simulation, latency=latency).backend(engine, skips=False).run()
    log = engine.log
    simulated, recorded = log.totals.last_finished_ns, int(latency.rows[-1]["finished_ns"])
    if not any(request.arrival_ns for request in simulation.workload.requests):
        assert log.totals.num_batches == pytest.approx(len(latency.rows), rel=DEVIATION)
    rows = sum(int(row["loop_count"]) * int(row["rows"]) for row in latency.rows)
    assert log.totals.recurrent_rows == pytest.approx(rows, rel=DEVIATION)
    assert simulated == pytest.approx(recorded, rel=DEVIATION)
