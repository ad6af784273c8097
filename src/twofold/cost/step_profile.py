"""The step-time model that a profile asks for."""

from __future__ import annotations

from twofold.cost.profile import Profile
from twofold.cost.step import StepTime
from twofold.cost.step_formula import PolynomialStep
from twofold.cost.step_table import TableStep


def step_time(profile: Profile, *, extrapolate: bool = False) -> StepTime:
    """A formula where the profile has one, else interpolation of its tables.

    Outside their range both raise OutOfRange unless `extrapolate`.
    """
    if profile.formula is not None:
        return PolynomialStep(
            profile.formula, profile.title, measured=profile.measured, extrapolate=extrapolate
        )
    return TableStep(profile, extrapolate=extrapolate)
