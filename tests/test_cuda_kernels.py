"""What Python owns of the CUDA kernels: their layout over a card, machine code kept on disk, falling back.
The kernels themselves are compared with the others where there is a card, when a run starts."""

import ctypes
import dataclasses
import re
from itertools import pairwise
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from executor.cuda import attention, batch, cache, driver, products, select, tall_attention  # noqa: E402
from executor.cuda.plan import MAX_ROWS, SERVED_ROWS, TILE_COLUMNS, plan_product, plan_products  # noqa: E402
from executor.errors import KernelError  # noqa: E402
from executor.kernels.ops import torch_ops  # noqa: E402
from policies.core.errors import InputError  # noqa: E402
from policies.core.models.shape import OURO_1_4B, OURO_TINY  # noqa: E402

MULTIPROCESSOR_BYTES, BLOCK_BYTES = 228 * 1024, 227 * 1024
"""Shared memory of a Hopper multiprocessor, and the most that a block of it may have."""


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "loop-twin"


def test_the_blocks_of_a_product_make_every_column_once() -> None:
    plans = plan_products(OURO_1_4B)
    assert plans is not None
    for plan in plans.values():
        assert plan.warps * TILE_COLUMNS * 128 == plan.columns
        assert plan.size_in % plan.piece == 0
        assert plan.threads <= 1024


def test_a_product_leaves_room_for_the_block_of_the_next_one() -> None:
    """Up to the rows that are served, and not only for itself. Rings alone are at most 96 KiB."""
    plans = plan_products(OURO_1_4B)
    assert plans is not None
    order = [plans[name] for name in ("rope", "o", "swiglu", "down", "rope")]
    for first, second in pairwise(order):
        assert first.shared_bytes(1) + second.shared_bytes(1) + 2 * 1024 <= MULTIPROCESSOR_BYTES
    assert max(plan.shared_bytes(MAX_ROWS) for plan in order) <= BLOCK_BYTES
    assert SERVED_ROWS <= MAX_ROWS


def test_pieces_of_rows_are_whole_rounds_of_the_ring() -> None:
    plan = plan_product("down", 2048, 5632)
    assert plan is not None
    assert (plan.piece, plan.stages) == (1408, 11)
    assert plan.shared_bytes(8) == 11 * 2 * 8 * 128 * 2 + 2 * 8 * (2 * 1408 + 16)


@pytest.mark.parametrize(("columns", "size_in"), [(2048 + 8, 2048), (2048, 2048 + 64), (64 * 2048, 2048)])
def test_a_product_whose_tiles_do_not_divide_it_has_no_plan(columns: int, size_in: int) -> None:
    assert plan_product("o", columns, size_in) is None


def test_a_small_model_has_no_plan_and_runs_the_other_kernels() -> None:
    assert plan_products(OURO_TINY) is None


def fields_of(source: str, name: str) -> list[str]:
    """Names of the members of `struct name`, in order, without those of its base."""
    match = re.search(rf"struct {name} (?:: \w+ )?{{(.*?)\n(?:}};|\n)", source, re.S)
    assert match is not None
    return re.findall(r"(\w+);", re.sub(r"//[^\n]*", "", match.group(1)))


@pytest.mark.parametrize(
    ("structure", "source", "name"),
    [
        (batch.Batch, attention.SOURCE, "Batch"),
        (batch.Batch, tall_attention.SOURCE, "Batch"),
        (attention.Arguments, attention.SOURCE, "Attention"),
        (tall_attention.Arguments, tall_attention.SOURCE, "Attention"),
        (products.RopeWrite, products.source_of(plan_products(OURO_1_4B) or {}), "RopeWrite"),
    ],
)
def test_a_kernel_s_arguments_are_laid_out_as_its_source_says(
    structure: type[ctypes.Structure], source: str, name: str
) -> None:
    members = [field[0] for field in structure._fields_ if field[0] not in ("padding", "batch")]
    assert members == fields_of(source, name)


def test_structures_of_the_driver_have_the_sizes_of_its_header() -> None:
    assert ctypes.sizeof(driver._Attribute) == 72
    assert ctypes.sizeof(driver._Config) == 56
    assert ctypes.sizeof(driver.TensorMap) == 128
    for structure, source, name in (
        (batch.Batch, attention.SOURCE, "Batch"),
        (attention.Arguments, attention.SOURCE, "Attention"),
        (tall_attention.Arguments, tall_attention.SOURCE, "Attention"),
    ):
        assert f"sizeof({name}) == {ctypes.sizeof(structure)}," in source


def test_sources_need_no_header_and_know_the_sizes_of_the_model() -> None:
    """NVRTC has none beside it."""
    source = products.source_of(plan_products(OURO_1_4B) or {})
    assert "#include" not in source + attention.SOURCE + tall_attention.SOURCE
    assert "#define DOWN_IN 5632\n" in source


def test_what_was_made_once_is_not_made_again(empty_cache: Path) -> None:
    made = []

    def make() -> bytes:
        made.append(1)
        return b"machine code"

    assert [cache.cached("key", make) for _ in range(3)] == [b"machine code"] * 3
    assert len(made) == 1
    assert cache.cached("other", make) == b"machine code" and len(made) == 2


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:5] + b"x" + data[6:]]
)
def test_a_damaged_file_is_made_anew_and_mended(empty_cache: Path, damage) -> None:
    cache.cached("key", lambda: b"machine code")
    path = empty_cache / "key.bin"
    path.write_bytes(damage(path.read_bytes()))
    assert cache.cached("key", lambda: b"made anew") == b"made anew"
    assert cache.read(path) == b"made anew"
    assert [item.name for item in empty_cache.iterdir()] == ["key.bin"], "nothing half written is left"


def test_a_folder_that_cannot_be_written_to_changes_nothing(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "loop-twin").write_text("a file where the folder would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cached("key", lambda: b"machine code") == b"machine code"


def test_a_relative_cache_home_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the XDG specification has it."""
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.folder() == Path.home() / ".cache" / "loop-twin"


def test_keys_tell_where_one_part_ends() -> None:
    assert cache.key_of("ab", "c") != cache.key_of("a", "bc")


class Card:
    """Stands in for a card: what the selection asks of it, and what it checks there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
        self.checks = 0
        self.found: list[str] = []
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(select.nvrtc, "version", lambda: "13.0")
        monkeypatch.setattr(select.nvrtc, "compile_cubin", lambda source, options: b"machine code")
        monkeypatch.setattr(select, "Module", lambda cubin: object())
        monkeypatch.setattr(select, "Products", lambda plans, module: _Products())
        monkeypatch.setattr(select, "ResidualNorms", lambda module: _unused)
        monkeypatch.setattr(select.Attention, "load", classmethod(lambda cls, base, module: _unused))
        monkeypatch.setattr(select, "differing", self._differing)
        monkeypatch.setattr(select.TallAttention, "load", classmethod(lambda cls, base, module: _unused))
        for name in ("differing_attention", "differing_tall", "differing_norms"):
            monkeypatch.setattr(select, name, lambda *_: [])

    def _differing(self, *_: object) -> list[str]:
        self.checks += 1
        return self.found


def _unused(*_: object) -> None:
    raise AssertionError("nothing runs here")


class _Products:
    linear = linear_rope = linear_swiglu = staticmethod(_unused)


def chosen(shape=OURO_1_4B, attention="auto"):
    return select.with_cuda(torch_ops(), shape, torch.device("cpu"), attention)


def test_the_bits_of_a_card_are_checked_once_and_kept(empty_cache: Path, monkeypatch) -> None:
    card = Card(monkeypatch)
    for _ in range(3):
        ops = chosen()
        assert ops.linear is _unused and ops.attention is _unused
        assert "CUDA C++" in ops.kernels and "torch for the rest" in ops.kernels
    assert card.checks == 1


def test_attention_by_triton_keeps_its_tiles_and_the_products_of_few_rows(
    empty_cache: Path, monkeypatch
) -> None:
    Card(monkeypatch)
    ops, base = chosen(attention="triton"), torch_ops()
    assert ops.linear is _unused and ops.attention is base.attention
    assert (ops.tile_classes, ops.tall_margin) == (base.tile_classes, base.tall_margin)
    assert "but for attention" in ops.kernels and "but for attention" not in chosen().kernels
    ours = chosen(attention="cuda")
    assert "ranges over 32 rows" in ours.kernels
    assert (ours.tile_classes, ours.tall_margin) == (tall_attention.TILE_CLASSES, tall_attention.TALL_MARGIN)


@dataclasses.dataclass
class FewRows:
    """Stands in for `Attention`: what serves taller tiles."""

    base: object


@pytest.mark.parametrize("found", [[], ["attention of ((0, 128),) in tiles of 128, 1 slots"]])
def test_tall_tiles_run_by_cuda_where_auto_takes_them_and_their_bits_hold(
    empty_cache: Path, monkeypatch, found: list[str]
) -> None:
    """Elsewhere Triton has them, the packer its heights and cuts, and the summary the reason."""
    Card(monkeypatch)
    monkeypatch.setattr(select.Attention, "load", classmethod(lambda cls, base, module: FewRows(base)))
    monkeypatch.setattr(select, "differing_tall", lambda *_: found)
    ops, base = chosen(), torch_ops()
    assert ops.linear is _unused
    assert ops.attention.base is (base.attention if found else _unused)
    taken = (base.tile_classes, base.tall_margin), (tall_attention.TILE_CLASSES, tall_attention.TALL_MARGIN)
    assert (ops.tile_classes, ops.tall_margin) == taken[not found]
    assert ("ranges over 32 rows" in ops.kernels) is (not found)
    assert ("bits differ in attention of" in ops.kernels) is bool(found)
    if found:
        with pytest.raises(InputError, match=r"attention: cuda cannot be had: .*bits differ in attention of"):
            chosen(attention="cuda")


def test_attention_by_cuda_that_cannot_be_had_is_refused_in_one_sentence(
    empty_cache: Path, monkeypatch
) -> None:
    card = Card(monkeypatch)
    card.found = ["attention of ((0, 128),) in tiles of 128, 1 slots"]
    with pytest.raises(
        InputError, match=r"attention: cuda cannot be had: torch .no CUDA C.*: bits differ in"
    ):
        chosen(attention="cuda")


def test_a_card_whose_bits_differ_runs_the_other_kernels_and_says_so(empty_cache: Path, monkeypatch) -> None:
    card = Card(monkeypatch)
    card.found = ["down at 5 rows"]
    for _ in range(2):
        ops = chosen()
        assert dataclasses.replace(ops, kernels="torch") == torch_ops()
        assert ops.kernels == "torch (no CUDA C++: bits differ in down at 5 rows)"
    assert card.checks == 1


@pytest.mark.parametrize(
    ("shape", "capability", "reason"),
    [
        (OURO_1_4B, (8, 0), "compute capability 8.0, not 9.0"),
        (OURO_TINY, (9, 0), "not made for ouro-tiny"),
        (dataclasses.replace(OURO_1_4B, dtype_bytes=4), (9, 0), "in 32 bits"),
    ],
)
def test_other_cards_models_and_dtypes_run_the_other_kernels(
    empty_cache: Path, monkeypatch, shape, capability, reason
) -> None:
    card = Card(monkeypatch, capability)
    ops = chosen(shape)
    assert ops.linear is torch_ops().linear and reason in ops.kernels
    assert card.checks == 0


def test_without_a_compiler_the_other_kernels_run(empty_cache: Path, monkeypatch) -> None:
    Card(monkeypatch)

    def missing() -> str:
        raise KernelError("no NVRTC library")

    monkeypatch.setattr(select.nvrtc, "version", missing)
    assert chosen().kernels == "torch (no CUDA C++: no NVRTC library)"
