"""What tests ask of the accesses of interpreted Triton kernels (`course.watching`)."""

from __future__ import annotations

from nsa_tutorial.course.accesses import Accesses


def assert_sound(seen: Accesses) -> None:
    """Each access inside an argument, no two programs on one element."""
    assert seen.launches, "no kernel was launched"
    assert not seen.faults, "\n".join(seen.faults)
