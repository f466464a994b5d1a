"""The frame every chapter uses: showing source, drawing, exercises, widgets.

A notebook imports from here only these names:

    from nsa_tutorial.course import check, exercise, show, side_by_side, solution
"""

from nsa_tutorial.course.checking import check, exercise, solution
from nsa_tutorial.course.source import phases, show, side_by_side

__all__ = ["check", "exercise", "phases", "show", "side_by_side", "solution"]
