"""Four small corpora with known difficulty, and a deep encoder that learns them in a minute on two
cores.

Nothing is downloaded.  Each corpus mirrors one of the paper's tasks and keeps its columns; one more
column, `difficulty` (1 to 5), says how many operations a reader must undo before the answer is
plain:

    1  nothing        The plot was superb and the cast was really funny.
       positive
    2  not | although The plot was not superb and the cast was hardly funny.
       negative
    3  both           Although the cast was funny, the plot was not superb.
       negative
    4  and a report   Although the cast was funny, Anna was wrong to say that the plot was not
       superb.        positive
    5  and one more   Some say that although ..., Anna was wrong to say that ..., and they are
       wrong.         negative

"Not" and "wrong" mean the opposite, and of two clauses joined by "although" or "but" only the main
one counts.  The last operation differs: a verdict on the whole (sentiment), a rating that may be
low (similarity), a claim of "few" (claims). Topics selects instead of negating: "rather than", then
the former or the latter, then printed or dropped, then all three.

Labels follow from the text by rule.  The plainest level is decided by single words, which a first
layer can see and which gets a network trained from scratch off the ground; flips are taken one time
in three, since a fair coin would hide every clue.

>>> corpus("sentiment", "train", 3).column_names
['text', 'label', 'difficulty']
"""

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from datasets import ClassLabel, Dataset, Features, Value
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AlbertConfig, ModernBertConfig, PretrainedConfig, PreTrainedTokenizerFast

LABELS = {
    "sentiment": ["negative", "positive"],
    "claims": ["SUPPORTS", "REFUTES", "NOT ENOUGH INFO"],
    "topics": ["World", "Sports", "Business", "Sci/Tech"],
    "similarity": None,  # a score from 0 to 5
}
COLUMNS = {
    "sentiment": ["text"],
    "claims": ["claim", "evidence"],
    "topics": ["text"],
    "similarity": ["sentence1", "sentence2"],
}
LEVELS = range(1, 6)
MAX_LENGTH = 40
SHARES = {
    "train": range(0, 70),
    "validation": range(70, 85),
    "test": range(85, 100),
}  # percent of all texts, by hash

# --------------------------------------------------------------------------------------------------
# Words

GOOD = "wonderful superb gripping moving charming brilliant clever funny elegant fresh".split()
BAD = "awful dull boring clumsy tedious terrible silly weak shallow stale".split()
FILM = "plot cast music script ending camera dialogue story acting humour".split()
SCALE = [  # 0 to 5
    "terrible awful".split(),
    "poor bad".split(),
    "mediocre dull".split(),
    "decent fair".split(),
    "good fine".split(),
    "superb excellent".split(),
]
HOTEL = (
    "food room service pool view staff breakfast bar garden lift beach bed dinner wine tour spa"
).split()
STARS = "no one two three four five".split()
RATERS = "guests visitors critics readers families couples tourists reporters".split()
PEOPLE = "anna ben carl dora emil fay".split()
CROWDS = "voters workers students farmers drivers nurses teachers miners pilots bakers".split()
PLANS = (
    "station festival hotel museum plan tax strike law treaty reform bridge tunnel merger budget"
    " airport dam".split()
)
BACK, OPPOSE, KNOW = (
    "back support favour".split(),
    "oppose reject resist".split(),
    "know discuss mention".split(),
)
LOW, HIGH = "10 20 30".split(), "70 80 90".split()
TOPICS = [
    "minister embassy treaty border refugees parliament ceasefire president summit senate".split(),
    (
        "goalkeeper coach striker tournament referee marathon olympics quarterback stadium playoffs"
    ).split(),
    "shares profit merger investors bank retailer inflation earnings takeover bonds".split(),
    "software telescope browser genome satellite chip vaccine robot spacecraft laptop".split(),
]
OUTLETS = "story report piece column bulletin feature".split()
GRAMMAR = (
    "the a was were is are not hardly really quite very and but although , . right wrong to say"
    " that some they gave awarded stars most few percent of it about wrote one editor printed"
    " dropped former latter rather than"
).split()

# --------------------------------------------------------------------------------------------------
# A statement: a clause with a value, wrapped in operations that move or flip the value


Example = tuple[list[str], Any]  # texts and their label


def contrast(rng: random.Random, main: str, aside: str) -> str:
    """Two clauses of which only `main` counts."""
    form = rng.choice(
        ["although {aside} , {main}", "{aside} but {main}", "{main} although {aside}"]
    )
    return form.format(main=main, aside=aside)


def statement(
    rng: random.Random,
    level: int,
    value: Any,
    aside: Any,
    clause: Callable[..., str],
    flip: Callable[[Any], Any],
) -> str:
    """A sentence whose value is `value`, after undoing `level - 1` operations; `aside` is the value
    of what does not count.

    `clause(subject, value, negated)` renders one clause about subject 0 or 1; a negated clause says
    `flip(value)` and "not".
    """
    if level == 1:
        return clause(0, value, False)
    if level == 2:
        if rng.random() < 0.5:
            return clause(0, value, True)
        return contrast(rng, clause(0, value, False), clause(1, aside, False))
    negated = rng.random() < 1 / 3  # exactly one of the two clauses is
    said, verdict = value, ""
    if level == 5:
        verdict = rng.choice(["right", "right", "wrong"])
        said = flip(said) if verdict == "wrong" else said
    report = ""
    if level >= 4:
        judged = rng.choice(["right", "right", "wrong"])
        said = flip(said) if judged == "wrong" else said
        report = f"{rng.choice(PEOPLE)} was {judged} to say that "
    text = contrast(rng, report + clause(0, said, negated), clause(1, aside, not negated))
    return f"some say that {text} , and they are {verdict}" if verdict else text


def sentiment(rng: random.Random, level: int) -> Example:
    label, subjects = rng.randrange(2), rng.sample(FILM, 2)

    def clause(subject: int, value: Any, negated: bool) -> str:
        word = rng.choice([BAD, GOOD][value ^ negated])
        adverb = rng.choice(["not", "hardly"]) if negated else rng.choice(["", "really", "very"])
        return f"the {subjects[subject]} was {adverb} {word}"

    text = statement(rng, level, label, rng.randrange(2), clause, lambda value: 1 - value)
    if " but " not in text and "although" not in text:  # one clause alone is short: say it twice
        text += " and " + clause(1, label, level == 2)
    return [text], label


def similarity(rng: random.Random, level: int) -> Example:
    anchor = rng.randrange(6) if level == 5 else rng.choice([4, 5])
    value, subjects = rng.randrange(6), rng.sample(HOTEL, 2)

    def clause(subject: int, value: Any, negated: bool) -> str:
        word = rng.choice(SCALE[5 - value if negated else value])
        adverb = rng.choice(["not", "hardly"]) if negated else rng.choice(["", "really", "quite"])
        return f"the {subjects[subject]} was {adverb} {word}"

    rating = (
        f"{rng.choice(RATERS)} {rng.choice(['gave', 'awarded'])} the {subjects[0]} {STARS[anchor]}"
        " stars"
    )
    text = statement(rng, min(level, 4), value, rng.randrange(6), clause, lambda value: 5 - value)
    return [rating, text], 5 - abs(anchor - value)


def claims(rng: random.Random, level: int) -> Example:
    label, crowds, plan = rng.choice([0, 0, 1, 1, 2]), rng.sample(CROWDS, 2), rng.choice(PLANS)
    most = level < 5 or rng.random() < 2 / 3

    def clause(
        subject: int, value: Any, negated: bool
    ) -> str:  # value: 1 most are for it, 0 few are, 2 nothing to the point
        share = rng.choice(LOW + HIGH if value == 2 else [LOW, HIGH][value ^ negated])
        verb = rng.choice(KNOW if value == 2 else OPPOSE if negated else BACK)
        return f"{share} percent of {crowds[subject]} {verb} it"

    value = 2 if label == 2 else int(most == (label == 0))
    claim = f"{'most' if most else 'few'} {crowds[0]} {rng.choice(BACK)} the {plan}"
    text = statement(
        rng, min(level, 4), value, rng.randrange(3), clause, lambda value: (1, 0, 2)[value]
    )
    return [claim, text], label


def topics(rng: random.Random, level: int) -> Example:
    label = rng.randrange(4)
    word = lambda topic: rng.choice(TOPICS[topic])
    other = (label + rng.randrange(1, 4)) % 4

    def subject(topic: int, hidden: bool) -> str:
        aside = word((topic + rng.randrange(1, 4)) % 4)
        if not hidden:
            return f"the {word(topic)}"
        return rng.choice(["the {0} rather than the {1}", "not the {1} but the {0}"]).format(
            word(topic), aside
        )

    outlet, writer = rng.choice(OUTLETS), rng.choice(PEOPLE)
    if level == 1:
        return [f"{writer} wrote a {outlet} about the {word(label)} and the {word(label)}"], label
    if level == 2:
        return [f"{writer} wrote a {outlet} about {subject(label, True)}"], label
    first = rng.random() < 0.5
    printed = level == 3 or rng.random() < 0.5
    both = (label, other) if first == printed else (other, label)
    a, b = (subject(topic, level == 5) for topic in both)
    choice = (
        f"the editor {'printed' if printed else 'dropped'} the {'former' if first else 'latter'}"
    )
    return [f"{writer} wrote a {outlet} about {a} and one about {b} but {choice}"], label


MAKERS = {"sentiment": sentiment, "claims": claims, "topics": topics, "similarity": similarity}
TASKS = tuple(MAKERS)


def prose(text: str) -> str:
    """Spaces, capitals and a full stop, for people; the tokenizer undoes all of it."""
    words = [w.capitalize() if w in PEOPLE else w for w in text.split()]
    text = " ".join(words).replace(" ,", ",") + "."
    return text[0].upper() + text[1:]


def corpus(task: str, split: str, n: int, seed: int = 0, noise: float = 0.02) -> Dataset:
    """`n` distinct examples of one split of a task, equally many of every difficulty.

    Splits never share a text, whatever the sizes and seeds: a text's own hash says to which split
    it belongs.

    task: sentiment, claims, topics or similarity.  split: train, validation or test.
    noise: share of labels replaced by another one (similarity: moved by one point); 0 keeps every
    label true to its text.
    """
    if task not in MAKERS:
        raise ValueError(f"no task {task!r}: choose from {', '.join(MAKERS)}")
    if split not in SHARES:
        raise ValueError(f"no split {split!r}: choose from {', '.join(SHARES)}")
    rng = random.Random(f"{task} {split} {seed}")
    rows: list[dict[str, Any]] = []
    seen, misses = set(), 0
    while len(rows) < n:
        level = 1 + len(rows) % len(LEVELS)
        made, label = MAKERS[task](rng, level)
        texts = tuple(map(prose, made))
        misses += 1
        if misses > 2000:
            raise ValueError(f"the {task} grammar has no {n} distinct {split} texts: ask for fewer")
        if texts in seen or zlib.crc32("\n".join(texts).encode()) % 100 not in SHARES[split]:
            continue
        seen.add(texts)
        misses = 0
        if rng.random() < noise:
            label = wrong(rng, task, label)
        rows.append(dict(zip(COLUMNS[task], texts), label=label, difficulty=level))
    rng.shuffle(rows)
    kind = Value("float32") if LABELS[task] is None else ClassLabel(names=LABELS[task])
    features = Features(
        {**{c: Value("string") for c in COLUMNS[task]}, "label": kind, "difficulty": Value("int64")}
    )
    return Dataset.from_list(rows, features=features)


def wrong(rng: random.Random, task: str, label: int) -> int:
    names = LABELS[task]
    if names is None:
        return label + 1 if label == 0 else label - 1 if label == 5 else label + rng.choice([-1, 1])
    return (label + rng.randrange(1, len(names))) % len(names)


# --------------------------------------------------------------------------------------------------
# Tokens and the encoder


def tokenizer() -> PreTrainedTokenizerFast:
    """One word, one token; the vocabulary is the grammar's own."""
    lists = [
        GOOD,
        BAD,
        FILM,
        *SCALE,
        HOTEL,
        STARS,
        RATERS,
        PEOPLE,
        CROWDS,
        PLANS,
        BACK,
        OPPOSE,
        KNOW,
        LOW,
        HIGH,
        *TOPICS,
        OUTLETS,
        GRAMMAR,
    ]
    words = sorted({word for words in lists for word in words})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {token: i for i, token in enumerate(special + words)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.BertProcessing(
        ("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"])
    )
    names = dict(
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=MAX_LENGTH, model_input_names=inputs, **names
    )


def config(
    task: str,
    layers: int = 12,
    shared: bool = False,
    width: int = 64,
    global_every: int = 3,
    labels: Sequence[str] | None = None,
) -> PretrainedConfig:
    """A deep and narrow encoder: ModernBERT, whose pre-norm layers train from scratch, or ALBERT,
    one layer used `layers` times.

    labels  names of the classes, none for regression, of a task that is not generated here
    """
    ids = tokenizer()
    if labels is None:
        if task not in LABELS:
            raise ValueError(f"no task {task!r}: choose from {', '.join(LABELS)}, or give labels=")
        labels = LABELS[task] or ()
    names = dict(enumerate(labels or ("score",)))
    common = dict(
        vocab_size=len(ids),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=ids.pad_token_id,
        bos_token_id=ids.cls_token_id,
        eos_token_id=ids.sep_token_id,
        id2label=names,
        label2id={name: i for i, name in names.items()},
        problem_type="single_label_classification" if labels else "regression",
    )
    if shared:
        return AlbertConfig(
            embedding_size=width,
            intermediate_size=2 * width,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
            **common,
        )
    return ModernBertConfig(
        intermediate_size=width,
        cls_token_id=ids.cls_token_id,
        sep_token_id=ids.sep_token_id,
        global_attn_every_n_layers=global_every,
        local_attention=10,
        **common,
    )


SIZES = {"train": 24_000, "validation": 2_000, "test": 2_000}
# options of cats.train.finetune.fine_tune; claims needs a second pass, its clues are the weakest
RECIPES = dict.fromkeys(
    TASKS, {"epochs": 1, "learning_rate": 1e-3, "batch_size": 64, "warmup": 0.1}
)
RECIPES["claims"] = RECIPES["claims"] | {"epochs": 2}


def splits(task: str, seed: int = 0) -> dict[str, Dataset]:
    """The three splits of a demo task."""
    return {split: corpus(task, split, n, seed) for split, n in SIZES.items()}
