"""All routers by name. A new one is a new file and a new line here."""

from policies.routing.at_random import AtRandom
from policies.routing.least_kv import LeastKv
from policies.routing.least_loaded import LeastLoaded
from policies.routing.prefix_affinity import PrefixAffinity
from policies.routing.round_robin import RoundRobin
from policies.routing.router import Router

_ALL: tuple[type[Router], ...] = (RoundRobin, LeastLoaded, LeastKv, PrefixAffinity, AtRandom)

ROUTERS = {router.name: router for router in _ALL}
assert len(ROUTERS) == len(_ALL), "two routers have the same name"
