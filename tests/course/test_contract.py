"""The operators' contract, asked of what a reader builds: ours hold it, and a mistake misses just
the properties that it breaks."""

from __future__ import annotations

import pytest
import torch

from nsa_tutorial.course import contract, keeping, mine

exhaustive = pytest.mark.exhaustive
BUILT = {exercise.name: exercise for _, exercise in keeping.all_builds()}


def test_every_twin_is_built() -> None:
    assert contract.TWINS.keys() <= BUILT.keys()
    for twin in contract.TWINS.values():
        assert set(twin.properties) <= set(contract.PROPERTIES)
        assert len(twin.properties) >= 5


@pytest.mark.parametrize(
    "name",
    [
        name if name == "triton_select_blocks" else pytest.param(name, marks=exhaustive)
        for name in contract.TWINS
    ],
)
def test_our_solutions_keep_the_contract(name: str) -> None:
    missing = BUILT[name].missing
    if missing:
        pytest.skip(missing[0])
    found = {what: contract.judge(name, BUILT[name].solution, what) for what in contract.PROPERTIES}
    assert {what for what, why in found.items() if why is not None} == set(
        contract.TWINS[name].properties
    )
    assert {what: why for what, why in found.items() if why} == {}


def attend(q, k, v, ids, first, visible, block_size, guard=True, running=True):
    """`triton_selected_attention` in PyTorch, with two mistakes to switch on."""
    (R, HQ, D), H = q.shape, k.shape[1]
    o, lse = q.new_zeros(R, HQ, v.shape[2]), q.new_full((R, HQ), -torch.inf)
    for row in range(R):
        for hq in range(HQ):
            head = hq // (HQ // H)
            tokens = [
                int(block) * block_size + j
                for block in ids[row, head]
                if block >= 0 or not guard
                for j in range(block_size)
                if 0 <= int(block.clamp(min=0)) * block_size + j < visible[row]
            ]
            at = int(first[row]) + torch.tensor(tokens, dtype=torch.long).clamp(min=0)
            if len(at):
                s = k[at, head] @ q[row, hq] * D**-0.5
                top = s.max() if running else torch.tensor(0.0)
                p = (s - top).exp()
                o[row, hq] = p @ v[at, head] / p.sum()
                lse[row, hq] = top + p.sum().log()
    return o, lse


def judged(**mistake: bool) -> set[str]:
    """The properties that an attempt misses."""

    def attempt(*arguments: object) -> object:
        return attend(*arguments, **mistake)

    return {
        what
        for what in contract.PROPERTIES
        if contract.judge("triton_selected_attention", attempt, what)
    }


def test_a_mistake_misses_what_it_breaks() -> None:
    assert judged() == set()
    # the first queries of a text have empty slots, too
    assert judged(guard=False) == {
        "causal: all queries",
        "empty slots",
        "nothing seen: o 0, lse -inf",
        "packed sequences",
    }
    assert judged(running=False) == {"scores two hundred apart"}


def test_an_error_is_told_in_a_line() -> None:
    def attempt(*arguments: object) -> object:
        raise IndexError("no such key\nsecond line")

    why = contract.judge("triton_selected_attention", attempt, "lists")
    assert why == "raised IndexError: no such key"


def test_lists_are_compared_exactly() -> None:
    def attempt(q, k_cmp, lse, M, block_size, n, num_initial, num_local, scale):
        return torch.zeros(len(q), k_cmp.shape[1], n, dtype=torch.int32)

    assert contract.judge("triton_select_blocks", attempt, "lists").endswith("lists differ")


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions across, properties down; what is not asked for is a dot."""

    def functions(exercise):
        return {"triton_selected_attention": lambda *a: attend(*a, guard=False)}.get(exercise.name)

    text, holds = mine.contract_report(functions)
    lines = text.splitlines()
    assert not holds
    assert lines[2].split() == ["lists", "✓"]
    assert "1  triton_selected_attention, as ops.selected_attention" in lines
    assert lines[-1].startswith("✗ 1, packed sequences: error ")
    assert mine.contract_report(lambda exercise: None) == ("", True)


def test_on_a_gpu_times_stand_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")

    def times(name, function):
        if name == "triton_select_blocks":
            raise RuntimeError("too much shared memory")
        return 3.0, 1.5

    monkeypatch.setattr(contract, "times", times)
    lines = mine._times({"triton_selected_attention": attend, "triton_select_blocks": attend})
    assert "a GPU" in lines[0]
    assert lines[1] == "  triton_selected_attention: 3.00 ms, ours 1.50 ms (2.0 times)"
    assert "not timed, RuntimeError: too much shared memory" in lines[2]
    assert any("FlashAttention" in line for line in lines)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in contract.TWINS if BUILT[name].launches])
def test_times_are_taken(name: str) -> None:
    mine_ms, ours_ms = contract.times(name, BUILT[name].solution, tokens=512)
    assert mine_ms > 0
    assert ours_ms > 0


def test_stored_times_say_what_they_belong_to() -> None:
    lines = contract.stored()
    assert sum("ours" in line for line in lines) == 1
    assert {"FlashAttention", "cuDNN"} <= {
        word for line in lines for word in line.split(", ")[0].split()
    }
    assert all("65,536 tokens" in line and "bfloat16" in line and "H200" in line for line in lines)
