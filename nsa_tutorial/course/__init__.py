"""The frame every chapter uses: showing source, drawing, exercises, predictions, widgets.

A notebook imports from here only these names:

    from nsa_tutorial.course import built, check, exercise, hint, phases, predict, progress
    from nsa_tutorial.course import reveal, show, side_by_side, solution
"""

from nsa_tutorial.course.checking import check, exercise, hint, solution
from nsa_tutorial.course.keeping import built
from nsa_tutorial.course.predictions import predict, reveal
from nsa_tutorial.course.source import phases, show, side_by_side
from nsa_tutorial.course.standing import progress

__all__ = [
    "built",
    "check",
    "exercise",
    "hint",
    "phases",
    "predict",
    "progress",
    "reveal",
    "show",
    "side_by_side",
    "solution",
]
