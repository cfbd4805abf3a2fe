"""All policies by name. A new one is a new file and a new line here."""

from policies.atomic import Atomic
from policies.core.seam.policy import Policy
from policies.mixed import Mixed
from policies.sjf import ShortestFirst
from policies.slo import Slo
from policies.split import Split
from policies.wcpb import Wavefront

_ALL: tuple[type[Policy], ...] = (
    Atomic,
    Split,
    Mixed,
    Wavefront,
    Slo,
    ShortestFirst,
)

POLICIES = {policy.name: policy for policy in _ALL}
assert len(POLICIES) == len(_ALL), "two policies have the same name"
