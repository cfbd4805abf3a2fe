"""How the products of few rows are laid over a card: blocks, warps, ring and pieces of each, from the model's
shape alone. What the names mean is in `products.cu`."""

from dataclasses import dataclass

from policies.core.models.shape import ModelShape

MAX_ROWS = 16
SERVED_ROWS = 8
"""Of batches that run these kernels: at more cuBLAS is as fast, as every block must bring all rows."""
TILE_COLUMNS = 8
LINE = 64
"""Inner elements of a line of 128 bytes, the most that the copy engine permutes."""
STAGE = 2 * LINE
"""Inner elements of one stage of a ring."""
BLOCKS = 128
"""One wave on cards of 128 multiprocessors and more; all products of Ouro divide by it."""
RING_BYTES = 96 * 1024
"""In flight per multiprocessor: enough for the memory's latency, and room for the next kernel's block."""
MAX_PIECE = 2048
"""Inner elements of the rows that a block holds at once, or twice over where there are more."""
MAX_WARPS = 16
HELPERS = 2
"""Warps of a block that only ask for weights and rows."""


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """One product: `columns` rows of the weight, `warps` column tiles per block, a ring of `stages`, `piece`
    inner elements of the rows at a time."""

    name: str
    size_in: int
    columns: int
    warps: int
    stages: int
    piece: int

    def shared_bytes(self, rows: int) -> int:
        """Of a block for `rows` rows: the ring, and the rows, two pieces where they have more.

        8 rows of Ouro's down (5632 elements, 2 warps, 11 stages of 4 KiB, pieces of 1408): 44 KiB + 44.3 KiB.
        """
        pieces = min(2, self.size_in // self.piece)
        return self.ring_bytes + pieces * rows * (2 * self.piece + 16)

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.warps * TILE_COLUMNS * STAGE * 2

    @property
    def threads(self) -> int:
        return (self.warps + HELPERS) * 32

    @property
    def defines(self) -> str:
        """What the source must know of it."""
        values = {"IN": self.size_in, "WARPS": self.warps, "STAGES": self.stages, "PIECE": self.piece}
        return "".join(f"#define {self.name.upper()}_{key} {value}\n" for key, value in values.items())


def plan_product(name: str, columns: int, size_in: int) -> ProductPlan | None:
    """The plan of a weight [columns, size_in]; None where the tiles do not divide it."""
    warps, all_stages = columns // TILE_COLUMNS // BLOCKS, size_in // STAGE
    if columns % (TILE_COLUMNS * BLOCKS) or size_in % STAGE or not 1 <= warps <= MAX_WARPS:
        return None
    in_piece = max(n for n in range(1, MAX_PIECE // STAGE + 1) if all_stages % n == 0)
    room = RING_BYTES // (warps * TILE_COLUMNS * STAGE * 2)
    found = [n for n in range(2, min(room, in_piece) + 1) if in_piece == all_stages or in_piece % n == 0]
    return ProductPlan(name, size_in, columns, warps, found[-1], in_piece * STAGE) if found else None


def plan_products(shape: ModelShape) -> dict[str, ProductPlan] | None:
    """Plans of the four products of a layer by name; None where one of them cannot be laid out like this."""
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = {
        "rope": (q_size + 2 * kv_size, shape.hidden_size),
        "o": (shape.hidden_size, q_size),
        "swiglu": (2 * shape.intermediate_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
    }
    plans = {name: plan_product(name, *size) for name, size in sizes.items()}
    found = {name: plan for name, plan in plans.items() if plan is not None}
    return found if len(found) == len(plans) and shape.head_dim == 128 else None
