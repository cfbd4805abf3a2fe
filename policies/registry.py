"""All policies by name. A new one is a new file and a new line here."""

from policies.atomic import Atomic
from policies.core.policy import Policy
from policies.mixed import Mixed
from policies.split import Split
from policies.wcpb import Wavefront

POLICIES: dict[str, type[Policy]] = {
    "atomic": Atomic,
    "split": Split,
    "mixed": Mixed,
    "wcpb": Wavefront,
}
