"""Nearest points, against a general solver."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.optimize import minimize

from lightning_dpsparse.estimators.rows import Array
from lightning_dpsparse.estimators.shrinking import nearest_in_l2_ball, project_onto_l1_ball

POINTS = [
    np.array([3.0, -1.0, 0.5, 0.0]),
    np.array([1.0, 1.0, -1.0, 1.0]),  # ties
    np.array([0.1, -0.1, 0.0, 0.0]),  # inside
    np.array([-5.0, 0.2, 0.1, 2.0]),
]


@pytest.mark.parametrize("radius", [0.5, 1.5])
@pytest.mark.parametrize("point_D", POINTS)
def test_projection_onto_the_l1_ball_solves_the_quadratic_program(
    point_D: Array, radius: float
) -> None:
    def distance(parts: Array) -> float:  # z = u - v with u, v >= 0
        return float(np.sum((parts[:4] - parts[4:] - point_D) ** 2))

    found = minimize(
        distance,
        np.full(8, 0.01),
        bounds=[(0, None)] * 8,
        constraints={"type": "ineq", "fun": lambda parts: radius - parts.sum()},
        options={"ftol": 1e-14, "maxiter": 500},
    )
    ours_D = project_onto_l1_ball(point_D, radius)
    assert np.abs(ours_D).sum() <= radius * (1 + 1e-12)
    np.testing.assert_allclose(ours_D, found.x[:4] - found.x[4:], atol=2e-5)


@pytest.mark.parametrize("radius", [0.5, 1.5])
@pytest.mark.parametrize("point_D", POINTS)
def test_the_nearest_point_of_the_l2_ball_in_l_inf_is_feasible_and_no_farther_than_any(
    point_D: Array, radius: float
) -> None:
    found = minimize(  # the least t with |z - x| <= t and ||z|| <= radius
        lambda zt: zt[4],
        np.append(np.zeros(4), np.abs(point_D).max()),
        constraints=[
            {"type": "ineq", "fun": lambda zt: zt[4] - (zt[:4] - point_D)},
            {"type": "ineq", "fun": lambda zt: zt[4] + (zt[:4] - point_D)},
            {"type": "ineq", "fun": lambda zt: radius**2 - zt[:4] @ zt[:4]},
        ],
        options={"ftol": 1e-14, "maxiter": 500},
    )
    ours_D = nearest_in_l2_ball(point_D, radius)
    assert np.linalg.norm(ours_D) <= radius * (1 + 1e-9)
    assert np.abs(ours_D - point_D).max() == pytest.approx(found.fun, abs=2e-5)


@pytest.mark.parametrize("nearest", [project_onto_l1_ball, nearest_in_l2_ball])
def test_points_inside_stay(nearest: Callable[[Array, float], Array]) -> None:
    np.testing.assert_array_equal(nearest(POINTS[2], 1.0), POINTS[2])
    np.testing.assert_array_equal(nearest(np.zeros(3), 1.0), np.zeros(3))
