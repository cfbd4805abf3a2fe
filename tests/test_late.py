"""Late tokens have one cause each, from the log of a run and what was predicted of its batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.config.runconfig import parse_config
from policies.core.errors import InputError
from results.cli import main
from results.late import late_tokens
from results.load import load_run
from results.predictions import read_predictions, write_predictions
from sim.predict import predict
from sim.run import simulate


def crowd(tmp_path: Path) -> tuple[Any, Path]:
    """A run, and the folder of what is predicted of it."""
    raw = {
        "policy": "wcpb",
        "slo": {"itl_ms": 8},
        "scheduler": {"max_num_seqs": 8, "prefill_chunk_size": 128},
        "workload": {
            "kind": "synthetic", "num_requests": 8, "arrival": {"process": "poisson", "rate": 20},
            "prompt_tokens": [900, 60], "output_tokens": 12,
        },
    }  # fmt: skip
    simulate(parse_config(raw, tmp_path, "x"), tmp_path / "run", plots=False)
    predict([tmp_path / "run"], tmp_path / "sim", None, 1)
    (folder,) = (tmp_path / "sim" / "cells").iterdir()
    return load_run(tmp_path / "run"), folder


def test_every_late_token_is_counted_once_under_the_cause_that_made_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = crowd(tmp_path)
    itl_ns = run.latencies().itl_ns
    found = late_tokens(run, folder, 8)
    assert found.gaps == len(itl_ns) == 8 * 11 and found.by.total() == (itl_ns > 8e6).sum() > 0
    # A simulation takes what its model says, and the device hardly waits.
    assert found.by["admission"] >= 0.9 * found.by.total()
    assert main(["late", str(tmp_path / "sim"), str(tmp_path / "run")]) == 0
    assert f"{found.by.total()} of 88 tokens later than 8 ms" in capsys.readouterr().out

    table = read_predictions(folder)
    assert table is not None
    for factor, cause in ((0, "model"), (10, "admission")):
        changed = table.assign(device_ns=table["device_ns"] * factor)
        write_predictions(folder, changed.itertuples(index=False))
        assert late_tokens(run, folder, 8).by == {cause: found.by.total()}
    longest_ms = float(np.max(itl_ns)) / 1e6
    assert late_tokens(run, folder, longest_ms).by.total() == 0


def test_other_batches_are_refused(tmp_path: Path) -> None:
    run, folder = crowd(tmp_path)
    write_predictions(folder, [(0,) * 10])
    with pytest.raises(InputError, match="predicts other batches"):
        late_tokens(run, folder, 8)
    with pytest.raises(InputError, match=r"has no predicted\.csv"):
        late_tokens(run, run.path, 8)
