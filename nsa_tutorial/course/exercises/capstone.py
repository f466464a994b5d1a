"""Exercises of chapter 17: how often a list holds the answer, a decoder's block, and the training
loop that can be killed, both built from an empty body."""

from __future__ import annotations

import io
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa_tutorial.course.diffs import diffs
from nsa_tutorial.course.exercises import Case, Double, Stage
from nsa_tutorial.course.texts import Texts

TEXTS = Texts(__name__)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


# -- share_of_hits --


def share_of_hits(lists: Tensor, distance: Tensor, block_size: int) -> float:
    """lists [N, S], distance [N]: the share of questions whose list holds the answer's block."""
    asked = distance != -100
    told = torch.arange(len(distance)) - distance
    holds = (lists == (told // block_size)[:, None]).any(-1)
    return holds[asked].float().mean().item()


def _lists(N: int, S: int, block_size: int, asked: list[int], back: list[int]) -> tuple:
    """Random ascending lists of the past, and questions at some positions."""
    g = torch.Generator().manual_seed(N + S)
    lists = torch.full((N, S), -1)
    for n in range(N):
        own = n // block_size
        some = torch.randperm(own + 1, generator=g)[:S].sort().values
        lists[n, : len(some)] = some
    distance = torch.full((N,), -100)
    distance[asked] = torch.tensor(back)
    return lists, distance, block_size


_HITS = TEXTS.exercise(
    "share_of_hits", minutes=7, difficulty=1, solution=share_of_hits, tolerance=1e-6,
    misconceptions=diffs(share_of_hits, [
        ("holds[asked]", "holds", "a share of all tokens, not of the questions",
         "Most tokens ask for nothing. By how many do you divide?"),
        ("torch.arange(len(distance)) - distance", "distance",
         "a distance taken for a position",
         "`distance` counts back from the question. Where does a question at token 40 find what "
         "was told 30 tokens before?"),
        ("torch.arange(len(distance)) - distance", "torch.arange(len(distance)) + distance",
         "an answer in the future",
         "What was told `distance` tokens ago stands before the question. What has to be "
         "subtracted?"),
        ("torch.arange(len(distance)) - distance", "torch.arange(len(distance))",
         "the question's own block",
         "The own block is always listed. In which block was the answer told?"),
        ("told // block_size", "told", "a token's position taken for its block",
         "Lists hold numbers of blocks. In which block is token 40, if a block has 16?"),
        ("(lists == (told // block_size)[:, None]).any(-1)",
         "(told // block_size < lists.shape[1])", "the number of a block taken for a slot",
         "A list names its blocks in any slots. Where in a row may the block stand?"),
        ("(lists == (told // block_size)[:, None]).any(-1)",
         "(lists == (told // block_size)[:, None]).float().mean(-1)",
         "a share of the slots, not of the questions",
         "One slot with the block is enough. Which of `any` and `mean` says that?"),
    ]),
    cases=(
        Case("four tokens, one question",
             lambda: (torch.tensor([[0, -1], [0, -1], [0, 1], [0, 1]]),
                      torch.tensor([-100, -100, -100, 2]), 2)),
        Case("eight tokens, two questions",
             lambda: (torch.tensor([[0, -1]] * 2 + [[0, 1]] * 2 + [[1, 2]] * 2 + [[0, 3]] * 2),
                      torch.tensor([-100] * 4 + [4, -100, 4, -100]), 2)),
        Case("forty tokens, blocks of 4", lambda: _lists(
            40, 3, 4, [10, 22, 24, 30, 36, 38], [2, 12, 20, 8, 30, 4])),
        Case("sixty tokens, blocks of 6", lambda: _lists(
            60, 4, 6, [12, 20, 28, 34, 44, 50, 56, 58], [10, 2, 20, 16, 6, 40, 44, 30])),
        Case("sixty tokens, lists of two", lambda: _lists(
            60, 2, 6, [12, 20, 28, 34, 44, 50, 56, 58], [10, 2, 20, 16, 6, 40, 44, 30])),
    ),
)  # fmt: skip


# -- decoder_block --


def decoder_block(
    x: Tensor, attend: Callable, mlp: Callable, own: Tensor, before: Tensor
) -> Tensor:
    """The stream x [B, N, width] after attention and mlp, both of which add to it."""
    width = x.shape[-1:]
    h = F.rms_norm(x, width)
    shifted = F.pad(h, (0, 0, 1, -1))  # each token gets the one before it
    x = x + attend(own * h + before * shifted)
    return x + mlp(F.rms_norm(x, width))


def _zero(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def _past_mean(x: Tensor) -> Tensor:
    """Stands for attention: the mean of all tokens up to each."""
    return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


def _halved(x: Tensor) -> Tensor:
    return 0.5 * x


def _squares(x: Tensor) -> Tensor:
    return x.square()


def _block_case(
    name: str, B: int, N: int, width: int, attend: Callable, mlp: Callable, *, shift: bool = False
) -> Case:
    def arguments() -> tuple:
        one, none = torch.ones(width).double(), torch.zeros(width).double()
        own, before = one, none
        if shift:
            own, before = _random(width, seed=7), _random(width, seed=8)
        return 3 * _random(B, N, width, seed=N), attend, mlp, own, before

    return Case(name, arguments)


_BLOCK = TEXTS.exercise(
    "decoder_block", minutes=12, difficulty=2, solution=decoder_block, tolerance=1e-5,
    forbidden=(("nsa_tutorial", "the course's own block"),),
    stages=(
        Stage("attention adds", (
            _block_case("one text of two tokens, no mlp", 1, 2, 2, _halved, _zero),
            _block_case("two texts, attention is a mean of the past", 2, 5, 3, _past_mean, _zero),
        )),
        Stage("the mlp adds", (
            _block_case("one text of two tokens, no attention", 1, 2, 2, _zero, _squares),
            _block_case("both", 2, 5, 3, _past_mean, _squares),
        )),
        Stage("the token before", (
            _block_case("three tokens, each with a part of the one before", 1, 3, 2, _halved, _zero,
                        shift=True),
            _block_case("two texts of seven tokens", 2, 7, 4, _past_mean, _squares, shift=True),
        )),
    ),
    misconceptions=diffs(decoder_block, [
        ("x = x + attend(own * h + before * shifted)", "x = attend(own * h + before * shifted)",
         "a block without its residual",
         "Attention and mlp *add* to the stream. What is left of `x` if attention gives 0?"),
        ("return x + mlp", "return mlp", "a block without its residual"),
        ({"h = F.rms_norm(x, width)": "h = x",
          "x = x + attend(own * h + before * shifted)":
          "x = F.rms_norm(x + attend(own * h + before * shifted), width)",
          "return x + mlp(F.rms_norm(x, width))": "return F.rms_norm(x + mlp(x), width)"},
         "a norm after the sum",
         "In the sum, `x` comes through untouched. Which of the two reads the norm: the stream, or "
         "what attention gets?"),
        ("x = x + attend", "x = h + attend",
         "adding to the norm of the stream",
         "The norm is only what attention reads. To what does attention add?"),
        ("return x + mlp(F.rms_norm(x, width))",
         "h = F.rms_norm(x, width)\n    return h + mlp(h)",
         "adding to the norm of the stream"),
        ("h = F.rms_norm(x, width)", "h = x", "attention that reads the stream without a norm",
         "The stream grows from block to block. What keeps what attention reads at one size?"),
        ("mlp(F.rms_norm(x, width))", "mlp(x)", "an mlp that reads the stream without a norm",
         "The mlp has a norm of its own. What does it read?"),
        ("mlp(F.rms_norm(x, width))", "mlp(h)", "an mlp that does not see what attention added",
         "The mlp comes after attention. Of which `x` does it read the norm?"),
        ("F.pad(h, (0, 0, 1, -1))", "F.pad(h, (0, 0, -1, 1))", "a shift that looks ahead",
         "Token 0 must not know token 1, which it is to predict. Which token does yours get?"),
        ("F.pad(h, (0, 0, 1, -1))", "torch.roll(h, 1, 1)", "a shift around the end",
         "The first token has none before it. Which one does yours get?"),
        ("F.pad(h, (0, 0, 1, -1))", "torch.roll(h, -1, 1)", "a shift that looks ahead"),
        ("F.pad(h, (0, 0, 1, -1))", "F.pad(h, (1, -1))", "a shift along the channels",
         "The axes are text, token, channel. Along which one does the token before lie?"),
        ("F.pad(h, (0, 0, 1, -1))", "F.pad(x, (0, 0, 1, -1))",
         "a token before that is taken from the stream",
         "Both parts come from what the norm gives. From which of the two is yours?"),
        ({"h = F.rms_norm(x, width)":
          "h = F.rms_norm(own * x + before * F.pad(x, (0, 0, 1, -1)), width)",
          "own * h + before * shifted": "h"},
         "a shift before the norm",
         "The norm comes first, and the shift mixes what it gives. In which order are yours?"),
        ("own * h + before * shifted", "h + before * shifted", "a token without its own part",
         "Each channel has two factors. Which multiplies the token itself?"),
        ("own * h + before * shifted", "own * shifted + before * h", "two factors exchanged",
         "`own` belongs to the token itself, and `before` to the one before it."),
    ]),
)  # fmt: skip


# -- train --


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, texts: Callable, rate: Callable,
    clip: float, until: int, state: dict | None = None,
) -> tuple:  # fmt: skip
    """Train up to step `until`, from step 0 or from `state`. The losses, and a new state."""
    first, losses = 0, []
    if state is not None:
        first = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
    for step in range(first, until):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        tokens, target = texts(step)
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    state = {"step": until}
    state["model"] = model.state_dict()
    state["optimizer"] = optimizer.state_dict()
    state["random"] = torch.get_rng_state()
    return losses, state


_VOCABULARY = 6


def _new(seed: int, dropout: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model, with weights by a seed, and its optimizer."""
    torch.manual_seed(seed)
    layers = [nn.Embedding(_VOCABULARY, 4), nn.Linear(4, _VOCABULARY)]
    if dropout:
        layers.insert(1, nn.Dropout(dropout))
    model = nn.Sequential(*layers).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.01)


def _texts(none: float, N: int, size: float) -> Callable:
    def texts(step: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(step)
        tokens = torch.randint(_VOCABULARY, (2, N), generator=g)
        target = (5 * tokens + 1 + step) % _VOCABULARY
        is_none = torch.rand(2, N, generator=g) < none
        is_none[0, -1] = False
        return tokens, target.masked_fill(is_none, -100)

    return texts


def _rate(step: int) -> float:
    return 0.3 / (step + 2)


def _stop_and_go(
    function: Callable, stops: tuple[int, ...], none: float, N: int, clip: float, dropout: float
) -> object:
    """Train with a function, and stop it at some steps. Each time, the state goes through a file,
    and the model and the optimizer are new ones. The losses of all runs, and the weights."""
    state, losses = None, []
    before = torch.get_rng_state()
    try:
        for life, until in enumerate(stops):
            model, optimizer = _new(life, dropout)
            gave = function(model, optimizer, _texts(none, N, clip), _rate, clip, until, state)
            if gave is None:
                return None
            found, state = gave
            losses += [float(loss) for loss in found]
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file)
    finally:
        torch.set_rng_state(before)
    weights = torch.cat([w.detach().flatten() for w in model.parameters()])
    return losses, weights


def _run_case(
    name: str, *stops: int, none: float = 0.0, N: int = 3, clip: float = 1e3, dropout: float = 0.0
) -> Case:
    return Case(name, lambda: (stops, none, N, clip, dropout))


_TRAIN = TEXTS.exercise(
    "train", minutes=20, difficulty=3, solution=train, run=_stop_and_go, tolerance=1e-9,
    returns=("losses", "weights"),
    forbidden=(("nsa_tutorial", "the course's own training loop"),),
    stages=(
        Stage("one step", (
            _run_case("one step on two texts of three tokens", 1),
        )),
        Stage("many steps", (
            _run_case("two steps", 2),
            _run_case("five steps", 5, N=4),
        )),
        Stage("questions alone", (
            _run_case("one step, half of the tokens ask for nothing", 1, none=0.5),
            _run_case("four steps, most tokens ask for nothing", 4, none=0.7, N=8),
        )),
        Stage("clipped", (
            _run_case("two steps, a largest norm of 0.05", 2, clip=0.05),
            _run_case("six steps, a largest norm of 0.2", 6, none=0.4, N=5, clip=0.2),
        )),
        Stage("goes on", (
            _run_case("stopped after one step, then one more", 1, 2),
            _run_case("stopped after 3 steps, then to 7", 3, 7, none=0.3, N=5),
            _run_case("stopped twice", 2, 5, 8, none=0.3, N=5, clip=0.2),
        )),
        Stage("the same dice", (
            _run_case("a model with dropout, stopped after 2 steps", 2, 4, dropout=0.4),
            _run_case("with dropout, stopped twice", 2, 3, 7, none=0.3, N=5, dropout=0.4),
        )),
    ),
    misconceptions=diffs(train, [
        ("F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)",
         "F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())",
         "targets that are shifted twice",
         "`target[:, t]` already is what follows `tokens[:, t]`. What do you compare it with?"),
        ("target.flatten(), ignore_index=-100", "target.flatten().clamp(min=0)",
         "a loss over tokens that ask for nothing",
         "A target of -100 says that nothing is asked. Which argument of `cross_entropy` leaves "
         "such positions out?"),
        ("target.flatten(), ignore_index=-100)",
         "target.flatten(), ignore_index=-100, reduction='sum') / target.numel()",
         "a mean over all tokens", "The mean is over the questions. By what do you divide?"),
        ("target.flatten(), ignore_index=-100)",
         "target.flatten(), ignore_index=-100, reduction='sum')",
         "a sum in place of a mean", "More questions must not make a larger step. By what is the "
         "sum to be divided?"),
        ("        optimizer.zero_grad()\n", "", "gradients that pile up",
         "`backward` adds to the gradients that are there. Who empties them before the next step?"),
        ("        optimizer.step()\n", "", "a run that changes no weight",
         "Either nobody lets the optimizer step, or the gradients are empty by then. What stands "
         "between `backward` and the step?"),
        ({"        optimizer.zero_grad()\n": "",
          "        loss.backward()\n": "        loss.backward()\n        optimizer.zero_grad()\n"},
         "a run that changes no weight"),
        ("        nn.utils.clip_grad_norm_(model.parameters(), clip)\n", "",
         "gradients that are not clipped when they are used",
         "`backward` makes the gradients, and the optimizer's step uses them. Where between the "
         "two do you limit their norm?"),
        ({"        nn.utils.clip_grad_norm_(model.parameters(), clip)\n": "",
          "        optimizer.step()\n":
          "        optimizer.step()\n"
          "        nn.utils.clip_grad_norm_(model.parameters(), clip)\n"},
         "gradients that are not clipped when they are used"),
        ({"        loss.backward()\n": "",
          "        nn.utils.clip_grad_norm_(model.parameters(), clip)\n":
          "        nn.utils.clip_grad_norm_(model.parameters(), clip)\n        loss.backward()\n"},
         "gradients that are not clipped when they are used"),
        ("nn.utils.clip_grad_norm_(model.parameters(), clip)",
         "nn.utils.clip_grad_value_(model.parameters(), clip)", "clipping each number by itself",
         "Then the gradient's direction changes. Which function scales all by one factor?"),
        ("nn.utils.clip_grad_norm_(model.parameters(), clip)",
         "[nn.utils.clip_grad_norm_([w], clip) for w in model.parameters()]",
         "clipping each weight's gradient by itself",
         "One norm is meant, of all gradients together. How many norms do you take?"),
        ("group[\"lr\"] = rate(step)", "pass", "a learning rate that nobody sets",
         "`rate(step)` is the learning rate of a step. Who reads it?"),
        ("group[\"lr\"] = rate(step)", "group[\"lr\"] = rate(0)", "the first step's rate for all",
         "The rate changes from step to step. Which argument does `rate` get?"),
        ("group[\"lr\"] = rate(step)", "group[\"lr\"] = rate(step + 1)",
         "a learning rate of the next step", "The first step of all is step 0. What is its rate?"),
    ]) + diffs(train, [  # these need a run that goes on
        ("group[\"lr\"] = rate(step)", "group[\"lr\"] = rate(step - first)",
         "a learning rate that begins anew",
         "After a stop, the steps go on with their numbers. Which number does the rate get?"),
        ({"range(first, until)": "range(until - first)"}, "steps that begin anew",
         "A run that goes on at step 3 needs the texts and the rate of step 3. Which numbers does "
         "your loop have?"),
        ({"range(first, until)": "range(first, first + until)"}, "as many steps once more",
         "`until` is the number of a step, not how many to do. How many are left at step 3 of 5?"),
        ("first = state[\"step\"]", "first = 0", "a step that is not kept",
         "How does the second run know which steps are done?"),
        ("{\"step\": until}", "{\"step\": until - 1}", "a step that is done twice",
         "`step` says where to go on. After steps 0, 1 and 2, which one is next?"),
        ("{\"step\": until}", "{\"step\": until + 1}", "a step that is left out",
         "`step` says where to go on. After steps 0, 1 and 2, which one is next?"),
        ("        model.load_state_dict(state[\"model\"])\n", "", "weights that are not kept",
         "The second run gets a new model. Where do the weights of the first come from?"),
        ("        optimizer.load_state_dict(state[\"optimizer\"])\n", "",
         "an optimizer that forgets",
         "AdamW keeps two averages for each weight. What are they in a new optimizer?"),
        ("        torch.set_rng_state(state[\"random\"])\n", "", "dice that begin anew",
         "Dropout draws random numbers. Which ones does a run draw that goes on in another "
         "process?"),
        ({"state[\"random\"] = torch.get_rng_state()": "state[\"random\"] = begin",
          "first, losses = 0, []": "first, losses, begin = 0, [], torch.get_rng_state()"},
         "dice as they were at the beginning",
         "The state is where the run stopped. When do you ask for the state of the dice?"),
    ], pairs=False),
)  # fmt: skip


EXERCISES = (_HITS, _BLOCK, _TRAIN)


# -- two mistakes at once --

DOUBLES = (
    Double("share_of_hits", names=(
        "a share of all tokens, not of the questions", "an answer in the future")),
    Double("decoder_block", names=(
        "a shift around the end", "a token without its own part")),
    Double("train", names=("gradients that pile up", "the first step's rate for all")),
)  # fmt: skip


# -- what the chapter warns of --

TRAPS = TEXTS.traps


# -- predictions --

PREDICTIONS = TEXTS.predictions(
    globals(),
    random_slots={"unit": "%", "choices": (1, 19, 61, 100)},
)
