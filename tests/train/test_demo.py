"""The demo corpora against a slow and obvious reader of their texts."""

import re

import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from cats.train import demo
from cats.train.finetune import new_model
from cats.train.tasks import Task

TASKS = demo.TASKS


# A reader that sees only the text: it undoes the operations from the outside in.


def meaning(text, clause, flip):
    """Value of a statement: verdict, then contrast, then report, then the plain clause."""
    text = text.rstrip(".").lower()
    whole = re.fullmatch(r"some say that (.*), and they are (right|wrong)", text)
    if whole:
        value = meaning(whole[1], clause, flip)
        return flip(value) if whole[2] == "wrong" else value
    if text.startswith("although "):
        return meaning(text.split(", ", 1)[1], clause, flip)
    if " although " in text:
        return meaning(text.split(" although ")[0], clause, flip)
    if " but " in text:
        return meaning(text.split(" but ")[1], clause, flip)
    report = re.fullmatch(r"\w+ was (right|wrong) to say that (.*)", text)
    if report:
        value = meaning(report[2], clause, flip)
        return flip(value) if report[1] == "wrong" else value
    return clause(text)


def read_sentiment(row):
    def clause(text):
        values = set()
        for part in text.split(" and "):
            *_, adverb, word = part.split()
            values.add((word in demo.GOOD) != (adverb in ("not", "hardly")))
        (value,) = values  # both halves agree
        return int(value)

    return meaning(row["text"], clause, lambda value: 1 - value)


def read_similarity(row):
    def clause(text):
        *_, adverb, word = text.split()
        (value,) = [i for i, words in enumerate(demo.SCALE) if word in words]
        return 5 - value if adverb in ("not", "hardly") else value

    stars = demo.STARS.index(row["sentence1"].split()[-2])
    return 5 - abs(stars - meaning(row["sentence2"], clause, lambda value: 5 - value))


def read_claims(row):
    def clause(text):  # True: most are for it; False: few are; None: not said
        share, verb = int(text.split()[0]), text.split()[4]
        return None if verb in demo.KNOW else (share > 50) == (verb in demo.BACK)

    backed = meaning(row["evidence"], clause, lambda value: None if value is None else not value)
    if backed is None:
        return 2
    return 0 if backed == row["claim"].startswith("Most") else 1


def read_topics(row):
    def topic(text):
        if text.startswith("not "):
            text = text.split(" but ")[1]
        text = text.split(" rather than ")[0].split(" and ")[0]
        (value,) = [i for i, words in enumerate(demo.TOPICS) if text.split()[-1] in words]
        return value

    text = row["text"].rstrip(".").lower().split(" about ", 1)[1]
    two = re.fullmatch(
        r"(.*) and one about (.*) but the editor (printed|dropped) the (former|latter)", text
    )
    if not two:
        return topic(text)
    return topic(two[1] if (two[3] == "printed") == (two[4] == "former") else two[2])


READERS = {
    "sentiment": read_sentiment,
    "similarity": read_similarity,
    "claims": read_claims,
    "topics": read_topics,
}


@pytest.mark.parametrize("task", TASKS)
def test_labels_follow_from_the_text(task):
    for row in demo.corpus(task, "train", 3000, noise=0):
        assert READERS[task](row) == row["label"], row


@pytest.mark.parametrize("task", TASKS)
def test_noise_is_what_it_says(task):
    rows = demo.corpus(task, "train", 5000, noise=0.1)
    share = sum(READERS[task](row) != row["label"] for row in rows) / 5000
    assert abs(share - 0.1) < 0.02  # more than four standard deviations


@pytest.mark.parametrize("task", TASKS)
def test_deterministic_by_seed(task):
    first, again, other = (
        demo.corpus(task, "validation", 300, seed=s).to_list() for s in (0, 0, 1)
    )
    assert first == again != other


@pytest.mark.parametrize("task", TASKS)
def test_splits_share_no_text_even_across_seeds(task):
    sizes = dict(train=20000, validation=4000, test=4000)
    texts = {
        s: [
            tuple(row[c] for c in demo.COLUMNS[task])
            for row in demo.corpus(task, s, n, seed=i).to_list()
        ]
        for i, (s, n) in enumerate(sizes.items())
    }
    for split, rows in texts.items():
        assert len(set(rows)) == len(rows) == sizes[split]
    assert not set(texts["train"]) & set(texts["validation"]) and not set(texts["train"]) & set(
        texts["test"]
    )
    assert not set(texts["validation"]) & set(texts["test"])


@pytest.mark.parametrize("task", TASKS)
def test_columns_difficulties_and_labels(task):
    rows = demo.corpus(task, "test", 1000)
    assert rows.column_names == [*demo.COLUMNS[task], "label", "difficulty"]
    assert [rows["difficulty"].count(level) for level in demo.LEVELS] == [200] * 5
    labels = set(range(6)) if demo.LABELS[task] is None else set(range(len(demo.LABELS[task])))
    for level in demo.LEVELS:
        assert {row["label"] for row in rows if row["difficulty"] == level} == labels


@pytest.mark.parametrize("task", TASKS)
def test_tokens_are_known_and_few(task, tmp_path):
    demo.tokenizer().save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    rows = demo.corpus(task, "train", 5000)
    ids = tokenizer(*[list(rows[c]) for c in demo.COLUMNS[task]])["input_ids"]
    assert tokenizer.padding_side == "right" and all(
        row[0] == tokenizer.cls_token_id for row in ids
    )
    assert not any(tokenizer.unk_token_id in row for row in ids)
    assert max(map(len, ids)) <= demo.MAX_LENGTH
    assert ids == demo.tokenizer()(*[list(rows[c]) for c in demo.COLUMNS[task]])["input_ids"]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("shared", [False, True])
def test_model_from_config(task, shared):
    model = AutoModelForSequenceClassification.from_config(
        demo.config(task, layers=3, shared=shared)
    ).eval()
    rows = demo.corpus(task, "test", 5)
    batch = demo.tokenizer()(
        *[list(rows[c]) for c in demo.COLUMNS[task]], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        out = model(**batch, output_hidden_states=True)
    assert out.logits.shape == (5, 1 if demo.LABELS[task] is None else len(demo.LABELS[task]))
    assert len(out.hidden_states) == 4
    same = (
        shared
        and model.config.model_type == "albert"
        or not shared
        and model.config.model_type == "modernbert"
    )
    assert same


def test_refusals():
    for arguments in [("weather", "train", 5), ("topics", "dev", 5), ("topics", "test", 10**5)]:
        with pytest.raises(ValueError):
            demo.corpus(*arguments)
    with pytest.raises(ValueError, match="no task 'weather'.*labels="):
        demo.config("weather")


@pytest.mark.parametrize("labels", [("dry", "wet", "snow"), ()])
def test_the_encoder_learns_a_task_from_outside(labels):
    """Its words are the grammar's, its labels whatever the task has."""
    config = new_model("demo", Task("weather", ("text",), labels)).config
    assert list(config.id2label.values()) == list(labels or ["score"])
    assert (config.problem_type == "regression") == (not labels)
