"""What one run of the capstone is: a variant of attention, a task, sizes and a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from nsa_tutorial.runtime import checks

# a variant of attention, and what it is
VARIANTS = {
    "dense": "all keys of the past",
    "window": "the latest keys alone",
    "nsa": "Native Sparse Attention",
    "random": "NSA whose free slots hold random blocks of the past",
    "no-selection": "NSA without its lists: summaries and window remain",
    "no-summaries": "NSA that attends to no summary: they only choose",
    "no-window": "NSA without its window",
    "learned-choice": "NSA whose scores also learn what each chosen block was worth",
    "moba": "lists of blocks alone, chosen by the blocks' mean keys",
    "msa": "lists of blocks alone, chosen by an indexer that learns from the attention",
    "dsa": "lists of as many single tokens, chosen by such an indexer",
    "top": "lists of the tokens with most attention, which needs all scores",
    "any": "lists of blocks at random",
}
LISTED = ("moba", "msa", "dsa", "top", "any")  # variants with one list, and nothing beside it
# a task, and what it asks for
TASKS = {
    "recall": "pairs of a key and a value; some keys come again, and ask for their value",
    "needle": "such pairs and questions, hidden in English text",
    "bytes": "English text, byte by byte",
}
# how a task differs from the defaults below
_DEFAULTS = {
    "recall": {},
    "needle": {"length": 512},
    "bytes": {"layers": 4, "width": 128, "query_heads": 4, "kv_heads": 2, "head_width": 32,
              "window_size": 32, "learning_rate": 2e-3, "batch": 8, "steps": 800},
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """A run. A wrong value raises `ValueError` or `TypeError` and names it.

    Attributes:
        attention, task: a name of `VARIANTS`, and of `TASKS`.
        length, batch: tokens of a text, and texts of a step.
        steps: of training. The learning rate falls to a tenth until the last.
        seed: of weights, texts and random blocks.
        layers, width, query_heads, kv_heads, head_width: of the model.
        window_size: keys of the window, of NSA and of "window".
        block_size, top_n, stride, compression, separate_keys: as for
            `NativeSparseAttentionConfig`; `summary_length` is its `length`.
        index_heads, index_width: of the indexer, for each KV head; of "msa" and "dsa".
        learning_rate, warmup: of AdamW, and the steps until the rate is reached.
        weight_decay, clip: of AdamW, and the largest norm of all gradients together.
        backend: of every operator, or "masks": whole matrices of scores, for short texts.
        device: of PyTorch. Matrices are bf16 on CUDA and fp32 on a CPU.
        compile: by `torch.compile`.
    """

    attention: str = "nsa"
    task: str = "recall"
    length: int = 256
    batch: int = 16
    steps: int = 500
    seed: int = 0
    layers: int = 1
    width: int = 64
    query_heads: int = 2
    kv_heads: int = 1
    head_width: int = 64
    block_size: int = 16
    top_n: int = 5
    window_size: int = 16
    summary_length: int = 8
    stride: int = 4
    compression: str = "linear"
    separate_keys: bool = True
    index_heads: int = 4
    index_width: int = 32
    learning_rate: float = 3e-3
    warmup: int = 50
    weight_decay: float = 0.01
    clip: float = 1.0
    backend: str = "masks"
    device: str = "cpu"
    compile: bool = False

    def __post_init__(self) -> None:
        checks.check_one_of("attention", self.attention, VARIANTS)
        checks.check_one_of("task", self.task, TASKS)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "seed":
                if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                    raise ValueError(f"seed: got {value!r}, expected an int of at least 0")
            elif field.type == "int":
                checks.check_positive_int(field.name, value)
            elif field.type == "float" and (value != 0 or field.name != "weight_decay"):
                checks.check_positive_number(field.name, value)
        if self.length < 32 or self.length % 2:
            raise ValueError(f"length: got {self.length}, expected an even number of at least 32")
        if self.backend != "masks":
            checks.check_backend(self.backend)

    @classmethod
    def of(cls, task: str = "recall", **changes: object) -> Settings:
        """The defaults of a task, with what is to differ."""
        checks.check_one_of("task", task, TASKS)
        return cls(task=task, **(_DEFAULTS[task] | changes))

    def as_dict(self) -> dict[str, object]:
        """For a file of JSON."""
        return asdict(self)

    def differences(self, other: Mapping[str, object]) -> list[str]:
        """What `other`, from `as_dict`, has differently, a line each."""
        own = self.as_dict()
        return [
            f"{name}: {other.get(name)!r} there, {own.get(name)!r} here"
            for name in sorted(own.keys() | other.keys())
            if own.get(name) != other.get(name)
        ]
