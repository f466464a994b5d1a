"""Buttons below a verdict: the next hint, and the solution.

They are there while a kernel is. What is stored has none, since a button without its kernel is an
error message; the exercise's own text says what to run instead.
"""

from __future__ import annotations

from collections.abc import Callable

from ipywidgets import HTML, Box, Button, Layout, VBox

from nsa_tutorial.course.listing import Listing
from nsa_tutorial.course.speech import Message

Hint = Callable[[str, str], Message]
Solution = Callable[[str, str], Listing]


class Help(VBox):
    """A row of two buttons for one exercise, and below it what they say.

    Args:
        chapter, name: of the exercise.
        hint: gives the next hint.
        solution: gives the solution.

    Attributes:
        hint_button, solution_button: what the reader presses.
        told: what is said, as HTML.
    """

    def __init__(self, chapter: str, name: str, hint: Hint, solution: Solution) -> None:
        self.hint_button = Button(description="Hint", tooltip=f"A hint for {name}")
        self.solution_button = Button(
            description="Solution", tooltip=f"Our solution of {name}, and why it is so"
        )
        self.told = HTML()
        self.told.layout.display = "none"
        self._call = f'hint("{chapter}", "{name}")'
        self.hint_button.on_click(lambda _button: self._say(hint(chapter, name)))
        self.solution_button.on_click(lambda _button: self._say(solution(chapter, name)))
        label = HTML(f"Stuck with <code>{name}</code>?")
        row = Box(
            [label, self.hint_button, self.solution_button],
            layout=Layout(flex_flow="row wrap", align_items="center"),
        )
        super().__init__([row, self.told])

    def _say(self, found: Message | Listing) -> None:
        self.told.value = found._repr_html_()
        self.told.layout.display = "block"

    def __repr__(self) -> str:
        return f"Stuck? Run {self._call}."
