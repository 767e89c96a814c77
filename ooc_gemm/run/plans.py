"""A plan on its way to another process."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..planning.plan import Plan
from ..storage.read.source import Opened


def slim(plan: Plan) -> Plan:
    """Return a plan without what others find out when they open the arrays or plan their part again."""
    p = plan.problem
    a, b, c = (replace(matrix, stored=None) for matrix in (p.a, p.b, p.c))
    return replace(plan, problem=replace(p, a=a, b=b, c=c), found=(), kept=(), done=frozenset(), advice=None)


def completed(plan: Plan, operands: Mapping[str, Opened]) -> Plan:
    """Return a slim plan with what opened operands tell of their matrices."""
    found: dict[str, Any] = {name: one.matrix for name, one in operands.items()}
    if plan.problem.symmetric:
        found["b"] = operands["a"].transpose().matrix
    return replace(plan, problem=replace(plan.problem, **found))
