"""From a profile to a model file: coefficients from all of it, errors from compositions that the solver did
not see.

A model file is keyed by its profile's content and by `FIT_VERSION`, so that a changed profile never meets a
stale fit.
"""

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from policies.config.hf_config import shape_from_hf_config
from policies.core.errors import InputError
from policies.core.models.shape import HUB_MODELS, SHIPPED_MODELS, ModelShape
from policies.core.seam.batch import Stage
from policies.costs.features import SPLIT_MARGIN, Cutting, Features
from policies.costs.modelfile import FIT_VERSION, SCHEMA, Copies, Errors, ModelFile, read_model
from policies.process.sentences import nearest
from results.profile import Profile, read_profile
from sim.solve import Case, fit_copies, fit_device, fit_host, fit_loop, fit_swap

Name = TypeVar("Name", bound=str)
FOLDS = 2
"""What a model claims is what a fit on half of the compositions gets wrong in the other half; it is itself
fitted on both."""
FEW_ROWS = {"5352f6f2254383f7c37d1925bca9057ca26810afc07526b9af3b84b0a8abeb86": 4}
"""`few_rows` of kernels, by hash, that were profiled before the header said it: executor/cuda/attention.py's
MAX_ROWS."""
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def fit_profile(profile: Profile, sha256: str) -> ModelFile:
    """The latency model of `profile`, whose bytes have the hash `sha256`. Raises `InputError` when a part was
    not measured."""
    model = shape_of(profile)
    cutting = cutting_of(profile, model)
    rows = [row for row in profile.rows if row.stage is not None and row.kind != "copies"]
    too_deep = next((row for row in rows if (row.loop_count or 0) > model.num_loops), None)
    if too_deep is not None:
        raise InputError(
            f"{profile.path}: case {too_deep.case!r} runs {too_deep.loop_count} loops, {model.name} has "
            f"{model.num_loops}"
        )
    cases = [Case.of(row, cutting) for row in rows]
    timed = [case for case in cases if case.row.device_ns and case.row.kind != "host"]
    for stage in (Stage.RECURRENT, Stage.PRELUDE, Stage.CODA):
        if not any(case.stage is stage for case in timed):
            raise InputError(
                f"{profile.path}: no device time of a {stage} batch, expected some: profile the device again"
            )
    served = {case.stage for case in timed if case.row.kind == "served"}
    errors = [
        (case, error)
        for case, error in held_out(timed, FOLDS)
        if case.row.kind == "served" or case.stage not in served
    ]
    copies = fit_copies(profile.of_kind("copies"), model.num_loops)
    swap = fit_swap(profile.of_kind("swap"), model.num_loops * model.kv_bytes_per_token_and_depth)
    return ModelFile(
        schema=SCHEMA,
        fit_version=FIT_VERSION,
        profile_sha256=sha256,
        profile=dict(profile.header),
        model=model,
        cutting=cutting,
        device=fit_device(timed, copies, swap),
        host=fit_host(cases),
        loop=fit_loop(profile),
        profiled=profiled(timed),
        errors_by_stage=summarize(errors, lambda case: case.stage),
        errors_by_component=summarize(errors, lambda case: case.row.kind),
        errors_by_family=summarize(families_held_out(timed), family_of),
    )


def fit_file(path: Path, out: Path) -> tuple[ModelFile, bool]:
    """Fit the profile at `path` into `out`, or find there what this fit made of this very profile; True when
    it was found.

    Raises `InputError` for a profile that cannot be used, and when `out` cannot be written or is the profile
    itself.
    """
    profile = read_profile(path)
    if out.exists() and (out.is_dir() or out.samefile(path)):
        raise InputError(
            f"--out {out}: is {'a directory' if out.is_dir() else 'the profile'}, expected a file for the "
            "model"
        )
    sha256 = sha256_of(path)
    try:
        found = read_model(out)
        if found.profile_sha256 == sha256:
            return found, True
    except InputError:
        pass
    model = fit_profile(profile, sha256)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        draft = out.with_name(out.name + ".tmp")
        draft.write_text(model.to_json(), encoding="utf-8")
        draft.replace(out)
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written: {error.strerror or error}") from None
    return model, False


def sha256_of(path: Path) -> str:
    """The hash that a model file names its profile by: of its bytes, but for line ends, which a checkout may
    change."""
    return hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).hexdigest()


def error_lines(model: ModelFile) -> Iterator[str]:
    """The held-out errors of `model` as a table for people."""
    yield f"{'held out':<22}{'cases':>6}{'median':>8}{'p95':>8}{'worst':>8}"
    families = {f"no {name}": errors for name, errors in model.errors_by_family.items()}
    for group in (model.errors_by_stage, model.errors_by_component, families):
        for name, errors in group.items():
            numbers = f"{errors.cases:>6}{errors.median:>8.2%}{errors.p95:>8.2%}{errors.worst:>8.2%}"
            yield f"{name:<22}{numbers}  {errors.worst_case}"


def shape_of(profile: Profile) -> ModelShape:
    """The profiled model in the profiled dtype. Raises `InputError` when it is neither shipped nor found at
    its path."""
    name, dtype = profile.header["model"], profile.header["dtype"]
    if dtype not in DTYPE_BYTES:
        raise InputError(f"{profile.path}: dtype: {dtype!r}, expected one of {', '.join(DTYPE_BYTES)}")
    if known := SHIPPED_MODELS.get(name) or HUB_MODELS.get(name):
        shape = known
    elif os.path.exists(name):
        shape = shape_from_hf_config(Path(name))
    else:
        raise InputError(
            f"{profile.path}: model: {name!r}{nearest(name, SHIPPED_MODELS)} or the path of a Hugging Face "
            "config.json"
        )
    return dataclasses.replace(shape, dtype_bytes=DTYPE_BYTES[dtype])


def cutting_of(profile: Profile, model: ModelShape) -> Cutting:
    """How the profiled executor cut batches, from the profile's header. Raises `InputError`."""

    def numbers(key: str, least: int = 1) -> tuple[int, ...]:
        text = profile.header[key]
        try:
            values = tuple(int(word) for word in text.split())
        except ValueError:
            values = ()
        if not values or min(values) < least or list(values) != sorted(values):
            raise InputError(f"{profile.path}: {key}: {text!r}, expected ascending whole numbers")
        return values

    tile_keys, split_keys, slots, partials, spare_items = (
        numbers(key)[0]
        for key in (
            "tile_keys",
            "split_keys",
            "attention_slots",
            "attention_partials",
            "attention_spare_items",
        )
    )
    buckets, heights = numbers("row_buckets"), numbers("tile_rows")
    short_rows = numbers("short_rows")[0] if "short_rows" in profile.header else 0
    few_rows = FEW_ROWS.get(profile.header["kernel_sha256"], 0)
    if "few_rows" in profile.header:
        few_rows = numbers("few_rows", least=0)[0]
    text = profile.header.get("tall_margin", str(SPLIT_MARGIN))
    try:
        tall_margin = float(text)
    except ValueError:
        tall_margin = 0.0
    if not 1 <= tall_margin < math.inf:
        raise InputError(f"{profile.path}: tall_margin: {text!r}, expected a number of 1 or more")
    return Cutting(
        buckets, heights, tile_keys, split_keys, slots, partials, spare_items, model.num_heads, short_rows,
        few_rows, tall_margin,
    )  # fmt: skip


Held = tuple[Case, float]
"""A case and its relative error, from coefficients that were solved without its composition."""


def fold_of(composition: str, folds: int) -> int:
    """The fold that holds out `composition`: by hash, so that another case more moves no other one."""
    return int.from_bytes(hashlib.sha256(composition.encode()).digest()[:8], "big") % folds


def held_out(cases: Sequence[Case], folds: int) -> list[Held]:
    """Every case predicted from the folds without its composition. Stages that would vanish from a fold stay
    in it, unpredicted."""
    errors: list[Held] = []
    for fold in range(folds):
        test = [case for case in cases if fold_of(case.composition, folds) == fold]
        train = [case for case in cases if fold_of(case.composition, folds) != fold]
        left = {case.stage for case in train}
        alone = [case for case in test if not (case.stage in left or case.loops)]
        times = fit_device(train + alone, Copies(0.0, 0.0, 0.0))
        errors += [
            (case, case.predicted_ns(times) / case.device_ns - 1) for case in test if case not in alone
        ]
    return errors


def family_of(case: Case) -> str:
    """The workload that a batch of a policy was formed on, the last part of its name; blank for others."""
    return case.row.case.rpartition(", ")[2] if case.row.kind == "batch" and ", " in case.row.case else ""


def families_held_out(cases: Sequence[Case]) -> list[Held]:
    """Every batch that a policy formed, predicted from a fit without its workload's batches and without their
    compositions."""
    errors: list[Held] = []
    for family in sorted({family_of(case) for case in cases} - {""}):
        test = [case for case in cases if family_of(case) == family and case.loops]
        unseen = {case.composition for case in test}
        train = [case for case in cases if family_of(case) != family and case.composition not in unseen]
        times = fit_device(train, Copies(0.0, 0.0, 0.0))
        errors += [(case, case.predicted_ns(times) / case.device_ns - 1) for case in test]
    return errors


def summarize(errors: Iterable[Held], group: Callable[[Case], Name]) -> dict[Name, Errors]:
    groups: dict[Name, list[Held]] = {}
    for held in errors:
        groups.setdefault(group(held[0]), []).append(held)
    return {name: _errors(groups[name]) for name in sorted(groups)}


def _errors(held: Sequence[Held]) -> Errors:
    sizes = np.array([abs(error) for _, error in held])
    case, error = held[int(sizes.argmax())]
    median, p95 = np.quantile(sizes, [0.5, 0.95])
    what = f"{case.row.case} x{case.loops}: {case.device_ns / 1e3:.1f} us measured, {error:+.1%}"
    return Errors(
        len(held), round(float(median), 5), round(float(p95), 5), round(float(sizes.max()), 5), what
    )


def profiled(cases: Sequence[Case]) -> Mapping[str, tuple[int, int]]:
    """Smallest and largest of every feature over recurrent cases."""
    features = [case.features for case in cases if case.loops]
    return {
        name: (int(min(column)), int(max(column)))
        for name, column in zip(Features._fields, zip(*features, strict=True), strict=True)
    }
