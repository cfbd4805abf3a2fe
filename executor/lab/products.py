"""What products that do not depend on their batch cost: a layer's four as the executor runs them, beside
cuBLAS as torch ships it, with a workspace.

`python -m executor.lab.products` prints a table, in microseconds of a layer, and at which numbers of rows a
product of cuBLAS gives other bits than at the most. cuBLAS reads its environment when CUDA starts, so every
side is a process.
"""

import json
import os
import subprocess
import sys
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from executor.cuda.plan import SERVED_ROWS
from executor.environment import CUBLAS_ENVIRONMENT, prepare_environment
from executor.kernels import linear
from executor.lab.few_rows import products, steps
from executor.lab.tune import LAYERS, PRODUCTS, Bench

ROWS = (1, 2, 4, 8, 16, 64, 128, 256, 512, 1024)
SIDES = ("ours", "cuBLAS")


def measure(side: str) -> dict[str, Any]:
    """Microseconds by product and rows, and the rows at which the first rows of a product have other bits."""
    bench = Bench(LAYERS, requests=1, context=max(ROWS))
    few = products() if side == "ours" else None
    times: dict[str, dict[int, float]] = {name: {} for name in PRODUCTS}
    for rows in ROWS:
        if few is None:
            of: dict[str, Any] = {name: bench.product(name, rows, None) for name in PRODUCTS}
        else:
            of = steps(bench, few if rows <= SERVED_ROWS else linear, rows)
        for name, run in of.items():
            times[name][rows] = bench.time_us(run)
    differing = {}
    for name, (_, size_in) in PRODUCTS.items():
        x, weight = torch.randn(max(ROWS), size_in, device="cuda").bfloat16(), bench.weights[name][0]
        whole = F.linear(x, weight)
        differing[name] = [rows for rows in ROWS if not torch.equal(F.linear(x[:rows], weight), whole[:rows])]
    return {"us": times, "differing": differing}


def compare() -> dict[str, Any]:
    """Both sides, one process after the other."""
    found = {}
    for side in SIDES:
        environment = {key: value for key, value in os.environ.items() if key not in CUBLAS_ENVIRONMENT}
        command = [sys.executable, "-m", "executor.lab.products", side]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
        found[side] = json.loads(done.stdout)
    return found


def print_products(found: dict[str, Any]) -> None:
    table = Table("rows", *(f"{name}: ours, cuBLAS" for name in (*PRODUCTS, "all")), "ours / cuBLAS")
    for rows in map(str, ROWS):
        pairs = [[found[side]["us"][name][rows] for side in SIDES] for name in PRODUCTS]
        ours, theirs = (sum(side) for side in zip(*pairs, strict=True))
        shown = [f"{one:.1f}, {other:.1f}" for one, other in (*pairs, (ours, theirs))]
        table.add_row(rows, *shown, f"{ours / theirs:.2f}")
    Console(width=120).print(table)
    for side in SIDES:
        differing = {name: rows for name, rows in found[side]["differing"].items() if rows}
        print(f"{side}: cuBLAS's bits depend on the rows beside at {differing or 'no row count'}", flush=True)


def main() -> None:
    if sys.argv[1:]:
        if sys.argv[1] == SIDES[0]:
            prepare_environment()
        print(json.dumps(measure(sys.argv[1])))
    else:
        print_products(compare())


if __name__ == "__main__":
    main()
