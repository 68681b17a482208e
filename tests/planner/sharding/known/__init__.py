"""Cases whose collectives and placements are known by formula: (case, [(kind, mesh axes, ring bytes)], {tensor:
placements}).
"""

from tests.planner.sharding.known.attention import ATTENTION
from tests.planner.sharding.known.executions import EXECUTIONS
from tests.planner.sharding.known.functions import FUNCTIONS
from tests.planner.sharding.known.products import PRODUCTS

KNOWN = [*PRODUCTS, *ATTENTION, *EXECUTIONS, *FUNCTIONS]
