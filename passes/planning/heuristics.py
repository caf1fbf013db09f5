"""What to evict first: the heuristics of DTR, and those that staging adds.

Kirisame et al., *Dynamic Tensor Rematerialization*, ICLR 2021, section 4 and appendix C.1.  A
heuristic gives every storage that may be evicted a score; the storage with the lowest score is
evicted, and ties are broken by id.

The published heuristics score the past: *staleness* is the clock less the last access.  A staged
planner knows the whole program, so the heuristics that end in ``_next`` put the *distance to the
next use* in the place of staleness (Belady, 1966): the next operator of the program that reads the
storage, or that needs a storage which was evicted and is computed from it.

In all heuristics, unlike in the authors' simulator, operators that have not run yet are never
counted in an evicted neighborhood, and neither are storages that nothing needs again.

A new heuristic needs a class with its formula and a line in `HEURISTICS`, both in this file, and a
row in docs/extending.md.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]
Ids: TypeAlias = npt.NDArray[np.intp]


class Neighborhood(enum.Enum):
    """The evicted storages whose costs are added to a storage's own cost (section 4.1).

    NONE: none (`h_dtr_local`).
    ANCESTORS: those that must be computed again before the storage can be (`h_msps`).
    EXACT: e*: evicted ancestors, and evicted descendants that are needed again.
    EQUIVALENCE: the union-find approximation of e*, ẽ*, with cost splitting (appendix C.2).
    """

    NONE = "none"
    ANCESTORS = "ancestors"
    EXACT = "exact"
    EQUIVALENCE = "equivalence"


@dataclass(slots=True)
class PoolState:
    """Facts about every storage, kept current by the simulator; index = storage id.

    Attributes:
        size_bytes: of the storage.
        cost_ns: c0, the cost of the operators that make its tensors.
        neighborhood_ns: cost of its evicted neighborhood, the storage itself left out.
        last_access_ns: clock at its last access.
        next_use_ns: baseline clock at its next use.
        clock_ns: the clock, recomputation included.
        baseline_clock_ns: the clock of the baseline at the present operator.
        draws: number of evictions so far; seeds `h_rand`.
    """

    size_bytes: Array
    cost_ns: Array
    neighborhood_ns: Array
    last_access_ns: Array
    next_use_ns: Array
    clock_ns: float = 0.0
    baseline_clock_ns: float = 0.0
    draws: int = 0


@dataclass(frozen=True, slots=True)
class Pool:
    """The storages that may be evicted now: ``ids``, ascending, and their facts in that order.

    ``copy_ns``: what moving each to the host and back would cost, if there is a link; the cost of a
    storage is then this or the cost of computing it again, whichever is lower.
    """

    ids: Ids
    state: PoolState
    copy_ns: Array | None = None

    @property
    def size_bytes(self) -> Array:
        """At least 1."""
        return self.state.size_bytes[self.ids]

    @property
    def cost_ns(self) -> Array:
        """c0."""
        return self._or_copied(self.state.cost_ns[self.ids])

    @property
    def neighborhood_cost_ns(self) -> Array:
        """c0 and the cost of the evicted neighborhood."""
        return self._or_copied(self.state.cost_ns[self.ids] + self.state.neighborhood_ns[self.ids])

    @property
    def staleness_ns(self) -> Array:
        """Time since the last access, at least 1."""
        return np.maximum(self.state.clock_ns - self.state.last_access_ns[self.ids], 1.0)

    @property
    def distance_ns(self) -> Array:
        """Baseline time to the next use, at least 1; infinite where there is none."""
        return np.maximum(self.state.next_use_ns[self.ids] - self.state.baseline_clock_ns, 1.0)

    def _or_copied(self, cost_ns: Array) -> Array:
        return cost_ns if self.copy_ns is None else np.minimum(cost_ns, self.copy_ns)


class Heuristic(ABC):
    """Interface of the heuristics.  Subclasses are frozen dataclasses whose fields are options.

    Attributes:
        name: the name under which it is registered; the paper's name, if there is one.
        formula: the formula of the score, for people.
        source: where the heuristic comes from.
        neighborhood: which evicted neighborhood `Pool.neighborhood_cost_ns` holds.
    """

    name: ClassVar[str]
    formula: ClassVar[str]
    source: ClassVar[str]
    neighborhood: ClassVar[Neighborhood] = Neighborhood.NONE

    @abstractmethod
    def scores(self, pool: Pool) -> Array:
        """One score for each storage of the pool; the storage with the lowest is evicted first."""


@dataclass(frozen=True)
class HDTR(Heuristic):
    """The paper's own heuristic: recompute cost per byte and staleness, with the exact e*."""

    name = "h_dtr"
    formula = "(c0 + Σ_{e*} c0) / (m · staleness)"
    source = "ICLR 2021, section 4.1, h_DTR"
    neighborhood = Neighborhood.EXACT

    def scores(self, pool: Pool) -> Array:
        return pool.neighborhood_cost_ns / (pool.size_bytes * pool.staleness_ns)


@dataclass(frozen=True)
class HDTREq(Heuristic):
    """The heuristic of the paper's prototype: e* is approximated by union-find."""

    name = "h_dtr_eq"
    formula = "(c0 + Σ_{ẽ*} c0) / (m · staleness)"
    source = "ICLR 2021, section 4.1, h_DTR^eq; appendix C.2"
    neighborhood = Neighborhood.EQUIVALENCE

    def scores(self, pool: Pool) -> Array:
        return pool.neighborhood_cost_ns / (pool.size_bytes * pool.staleness_ns)


@dataclass(frozen=True)
class HDTRLocal(Heuristic):
    """`h_dtr` without any neighborhood."""

    name = "h_dtr_local"
    formula = "c0 / (m · staleness)"
    source = "ICLR 2021, section 4.1, h_DTR^local"

    def scores(self, pool: Pool) -> Array:
        return pool.cost_ns / (pool.size_bytes * pool.staleness_ns)


@dataclass(frozen=True)
class HLRU(Heuristic):
    """The least recently used storage first."""

    name = "h_lru"
    formula = "1 / staleness"
    source = "ICLR 2021, section 4.1, h_LRU"

    def scores(self, pool: Pool) -> Array:
        return 1.0 / pool.staleness_ns


@dataclass(frozen=True)
class HSize(Heuristic):
    """The largest storage first."""

    name = "h_size"
    formula = "1 / m"
    source = "ICLR 2021, section 4.1, h_size (GreedyRemat of Kumar et al., 2019)"

    def scores(self, pool: Pool) -> Array:
        return 1.0 / pool.size_bytes


@dataclass(frozen=True)
class HMSPS(Heuristic):
    """Least cost per byte, ancestors included: Capuchin's memory saving per second, inverted."""

    name = "h_msps"
    formula = "(c0 + Σ_{evicted ancestors} c0) / m"
    source = "ICLR 2021, section 4.1, h_MSPS (Peng et al., ASPLOS 2020)"
    neighborhood = Neighborhood.ANCESTORS

    def scores(self, pool: Pool) -> Array:
        return pool.neighborhood_cost_ns / pool.size_bytes


@dataclass(frozen=True)
class HRand(Heuristic):
    """Uniformly random, from ``seed`` and the number of evictions so far."""

    name = "h_rand"
    formula = "U(0, 1)"
    source = "ICLR 2021, section 4.1, h_rand"

    seed: int = 0

    def scores(self, pool: Pool) -> Array:
        return np.random.default_rng((self.seed, pool.state.draws)).random(len(pool.ids))


@dataclass(frozen=True)
class HDTRNext(Heuristic):
    """`h_dtr` with the distance to the next use; the exponents weigh bytes and distance."""

    name = "h_dtr_next"
    formula = "(c0 + Σ_{e*} c0) / (m^a · distance^b)"
    source = "staging: h_DTR with Belady's distance in place of staleness"
    neighborhood = Neighborhood.EXACT

    size_exponent: float = 1.0
    distance_exponent: float = 1.0

    def scores(self, pool: Pool) -> Array:
        return _weigh(pool.neighborhood_cost_ns, pool, self.size_exponent, self.distance_exponent)


@dataclass(frozen=True)
class HDTREqNext(Heuristic):
    """`h_dtr_eq` with the distance to the next use; the exponents weigh bytes and distance."""

    name = "h_dtr_eq_next"
    formula = "(c0 + Σ_{ẽ*} c0) / (m^a · distance^b)"
    source = "staging: h_DTR^eq with Belady's distance in place of staleness"
    neighborhood = Neighborhood.EQUIVALENCE

    size_exponent: float = 1.0
    distance_exponent: float = 1.0

    def scores(self, pool: Pool) -> Array:
        return _weigh(pool.neighborhood_cost_ns, pool, self.size_exponent, self.distance_exponent)


@dataclass(frozen=True)
class HMSPSNext(Heuristic):
    """`h_msps` with the distance to the next use; the exponents weigh bytes and distance."""

    name = "h_msps_next"
    formula = "(c0 + Σ_{evicted ancestors} c0) / (m^a · distance^b)"
    source = "staging: h_MSPS with Belady's distance"
    neighborhood = Neighborhood.ANCESTORS

    size_exponent: float = 1.0
    distance_exponent: float = 1.0

    def scores(self, pool: Pool) -> Array:
        return _weigh(pool.neighborhood_cost_ns, pool, self.size_exponent, self.distance_exponent)


def _weigh(cost_ns: Array, pool: Pool, size_exponent: float, distance_exponent: float) -> Array:
    # A power costs ten times a product, and 1 is the common exponent.
    size = pool.size_bytes if size_exponent == 1.0 else pool.size_bytes**size_exponent
    if distance_exponent == 0.0:
        return cost_ns / size
    distance = pool.distance_ns
    return cost_ns / (
        size * (distance if distance_exponent == 1.0 else distance**distance_exponent)
    )


HEURISTICS: dict[str, type[Heuristic]] = {
    HDTR.name: HDTR,
    HDTREq.name: HDTREq,
    HDTRLocal.name: HDTRLocal,
    HLRU.name: HLRU,
    HSize.name: HSize,
    HMSPS.name: HMSPS,
    HRand.name: HRand,
    HDTRNext.name: HDTRNext,
    HDTREqNext.name: HDTREqNext,
    HMSPSNext.name: HMSPSNext,
}
