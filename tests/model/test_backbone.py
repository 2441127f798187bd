"""The backbone against Hugging Face's own forward pass: a tiny random model of every family,
weights far from default.
"""

import pytest
import torch
from builders import CASES, LENGTHS, SMALL, TOKENS, build, make_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from cats.model.backbone import Backbone
from cats.model.families import FAMILIES

TOLERANCE = 1e-5
SEEN = 1e-3  # what a planted mistake must change at least

each_case = pytest.mark.parametrize("case", CASES)
each_case_and_attention = pytest.mark.parametrize(
    "case, attention", [(c, a) for c, spec in CASES.items() for a in spec[1]]
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@torch.inference_mode()
def run(backbone, batch, keep=lambda k, state: None, trim=True):
    """Logits after all layers; `keep(k, state)` names the rows to keep after layer k (0: the
    embeddings), or None for all.
    """
    state = backbone.start(batch)
    for k in range(backbone.n_layers + 1):
        state = backbone.step(state, k) if k else state
        rows = keep(k, state)
        state = state if rows is None else backbone.keep(state, rows, trim)
    return backbone.finish(state)


@torch.inference_mode()
def reference(backbone, batch, **kwargs):
    return backbone.model(**batch, **kwargs)


def gap(a, b):
    assert a.shape == b.shape
    return (a - b).abs().max().item() if a.numel() else 0.0


# ------------------------------------------------------------------------------------------------
# equal to Hugging Face


@each_case_and_attention
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_all_layers_give_the_logits_of_the_model(case, attention, left):
    backbone = build(case, attention)
    assert backbone.model.config._attn_implementation == attention
    batch = make_batch(backbone, left=left)
    logits = reference(backbone, batch).logits
    assert logits.std(0).min() > 1e-2, "the rows are so alike that this test could not fail"
    assert gap(run(backbone, batch), logits) < TOLERANCE


@each_case_and_attention
def test_cls_after_every_layer(case, attention):
    backbone = build(case, attention)
    batch = make_batch(backbone)
    hidden = reference(backbone, batch, output_hidden_states=True).hidden_states
    inner = getattr(
        backbone.model.config, "inner_group_num", 1
    )  # Hugging Face lists the modules within an ALBERT layer
    assert len(hidden) == backbone.n_layers * inner + 1
    states = backbone.states(batch)
    cls, mean, logits = states["cls"], states["mean"], states["logits"]  # (rows, l, d), (rows, C)
    assert cls.shape == (len(LENGTHS), backbone.n_layers, backbone.hidden_size)
    assert logits.shape == (len(LENGTHS), backbone.num_labels)
    if backbone.family == "modernbert":  # Hugging Face shows the last state after the final norm
        with torch.no_grad():
            cls[:, -1] = backbone.model.base_model.final_norm(cls[:, -1])
    for k in range(1, backbone.n_layers + 1):
        assert gap(cls[:, k - 1], hidden[k * inner][:, 0]) < TOLERANCE * max(1, cls.abs().max())
        if backbone.family == "modernbert" and k == backbone.n_layers:
            continue
        for row, length in enumerate(LENGTHS):
            expected = hidden[k * inner][row, :length].mean(0)
            assert gap(mean[row, k - 1], expected) < TOLERANCE * max(1, mean.abs().max())


@each_case
def test_how_two_texts_differ(case):
    """|a - b| and a·b of the means over either text, against a loop over rows."""
    backbone = build(case)
    batch = make_batch(backbone)
    batch["second"] = torch.tensor([1 + length // 2 for length in LENGTHS])
    state = backbone.step(backbone.start(batch), 1)
    found = backbone.read(state, "cls+mean+pair")[:, 2 * backbone.hidden_size :]
    for row, (length, second) in enumerate(zip(LENGTHS, batch["second"].tolist())):
        hidden = state.hidden[row]
        a, b = hidden[:second].mean(0), hidden[second:length].mean(0)
        expected = torch.cat([(a - b).abs(), a * b])
        assert gap(found[row], expected) < TOLERANCE * max(1, expected.abs().max())
    with pytest.raises(ValueError, match="read pairs of texts"):
        backbone.read(backbone.start(make_batch(backbone)), "cls+mean+pair")
    with pytest.raises(ValueError, match="where its second text begins"):
        backbone.start(batch | {"second": 0 * batch["second"]})


def test_no_sums_where_nobody_reads_them():
    """Where heads read [CLS] alone, or F itself runs, no weights of tokens travel along."""
    backbone = build("bert")
    state = backbone.step(backbone.start(make_batch(backbone), sums=False), 1)
    joined = backbone.join(backbone.keep(state, [0, 2]), backbone.keep(state, [1]))
    assert state.weights is joined.weights is None
    assert torch.equal(backbone.read(joined, "cls"), joined.hidden[:, 0])
    with pytest.raises(ValueError, match="without sums"):
        backbone.read(joined, "cls+mean")


@each_case
def test_one_row_without_mask_or_types(case):
    backbone = build(case)
    batch = {"input_ids": make_batch(backbone, [11], 11)["input_ids"]}
    assert gap(run(backbone, batch), reference(backbone, batch).logits) < TOLERANCE


@each_case
def test_a_row_does_not_depend_on_its_batch(case):
    """So exits decided in a batch are those of the row alone. MobileBERT needs a column of padding
    for that: see `MobileBert`.
    """
    backbone = build(case)
    batch = make_batch(backbone)
    together = run(backbone, batch)
    for padding in 0, 1:
        alone = [
            {name: x[i : i + 1, : n + padding] for name, x in batch.items()}
            for i, n in enumerate(LENGTHS)
        ]
        difference = gap(torch.cat([run(backbone, row) for row in alone]), together)
        if case == "mobilebert" and not padding:
            assert difference > SEEN
        else:
            assert difference < TOLERANCE


@each_case
def test_bool_mask_and_needless_types(case):
    backbone = build(case)
    batch = make_batch(backbone)
    logits = reference(backbone, batch).logits
    batch = (
        {"token_type_ids": batch["attention_mask"]}
        | batch
        | {"attention_mask": batch["attention_mask"].bool()}
    )
    assert gap(run(backbone, batch), logits) < TOLERANCE


@each_case_and_attention
def test_autocast(case, attention):
    backbone = build(case, attention)
    batch = make_batch(backbone)
    rows = torch.tensor([3, 1, 4])
    with torch.autocast("cpu", torch.bfloat16):
        logits = reference(backbone, batch).logits.float()
        assert gap(run(backbone, batch).float(), logits) < TOLERANCE
        kept = run(backbone, batch, lambda k, state: rows if k == 2 else None).float()
    assert gap(kept, logits[rows]) < 0.05 * logits.abs().max()  # bfloat16 has eight bits


# ------------------------------------------------------------------------------------------------
# rows that leave


@each_case_and_attention
def test_keep_leaves_the_other_rows_alone(case, attention):
    backbone = build(case, attention)
    batch = make_batch(backbone)
    expected = reference(backbone, batch).logits
    generator = torch.Generator().manual_seed(2)
    for _ in range(4):
        left = torch.arange(len(LENGTHS))

        def keep(k, state):
            nonlocal left
            rows = torch.rand(len(left), generator=generator) < 0.75  # bool mask
            rows[torch.randint(len(left), (), generator=generator)] = True
            rows = (
                rows if k % 2 else rows.nonzero()[:, 0].flip(0)
            )  # or row numbers, in another order
            left = left[rows]
            return rows

        logits = run(backbone, batch, keep)
        assert gap(logits, expected[left]) < TOLERANCE


@each_case
@pytest.mark.parametrize(
    "lengths", [[TOKENS] * 6, [TOKENS, 5, TOKENS, 9, 3, TOKENS]], ids=["full", "padded"]
)
def test_rows_from_the_end_fill_gaps_in_place(case, lengths):
    backbone = build(case)
    batch = make_batch(backbone, lengths)
    expected, left, addresses = reference(backbone, batch).logits, [0, 1, 2, 3, 4, 5], set()

    def keep(k, state):
        rows = {1: [0, 5, 2, 3, 4], 2: [0, 1, 2, 4]}.get(k)
        if rows:
            left[:] = [left[row] for row in rows]
            kept = backbone.keep(state, rows)
            addresses.add(kept.hidden.data_ptr() == state.hidden.data_ptr())
        return rows

    assert gap(run(backbone, batch, keep), expected[left]) < TOLERANCE
    assert addresses == {True}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int, torch.float])
def test_a_mask_may_be_of_any_type(dtype):
    backbone = build("bert")
    batch = make_batch(backbone, [5, 9])
    start, other = (
        backbone.start(batch),
        backbone.start({**batch, "attention_mask": batch["attention_mask"].to(dtype)}),
    )
    assert other.lengths == start.lengths == [5, 9] and torch.equal(other.mask, start.mask)


@each_case
def test_trimming_cuts_the_tensors_and_changes_nothing(case):
    backbone = build(case)
    batch = make_batch(backbone)
    expected, rows = reference(backbone, batch).logits, torch.tensor([4, 2])
    for layer in range(backbone.n_layers + 1):
        for trim, width in (True, 9), (False, TOKENS):
            shapes = []

            def keep(k, state):
                shapes.append(state.hidden.shape[:2])
                return rows if k == layer else None

            assert gap(run(backbone, batch, keep, trim), expected[rows]) < TOLERANCE
            assert shapes[layer] == (5, TOKENS) and set(shapes[layer + 1 :]) <= {(2, width)}


@each_case
def test_left_padding_is_not_trimmed(case):
    backbone = build(case)
    batch, rows = make_batch(backbone, left=True), torch.tensor([1, 4])
    expected = reference(backbone, batch).logits[rows]
    assert (
        gap(run(backbone, batch, lambda k, state: rows if k == 1 else None), expected) < TOLERANCE
    )
    assert backbone.keep(backbone.start(batch), rows).hidden.shape[1] == TOKENS


def test_a_row_without_tokens_is_not_trimmed():
    """Eager attention spreads evenly over the columns when all of them are masked, so there their
    number matters.
    """
    backbone = build("bert", "eager")
    batch, rows = make_batch(backbone, lengths=[17, 0, 9]), torch.tensor([1, 2])
    expected = reference(backbone, batch).logits[rows]
    assert (
        gap(run(backbone, batch, lambda k, state: rows if k == 1 else None), expected) < TOLERANCE
    )


@pytest.mark.parametrize("case", ["albert", "modernbert-mean"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_exits(case, data):
    """Rows of any lengths that leave at any layers, as a CAT would have it: each row that stays
    gets the logits of F.
    """
    backbone = build(case)
    lengths = data.draw(st.lists(st.integers(1, TOKENS), min_size=1, max_size=6))
    exits = data.draw(
        st.lists(
            st.integers(0, backbone.n_layers + 1), min_size=len(lengths), max_size=len(lengths)
        )
    )
    batch = make_batch(backbone, lengths)
    exits = left = torch.tensor(exits)

    def keep(k, state):
        nonlocal left
        rows = left > k
        left = left[rows]
        return rows

    logits = run(backbone, batch, keep)
    assert gap(logits, reference(backbone, batch).logits[exits > backbone.n_layers]) < TOLERANCE


# ------------------------------------------------------------------------------------------------
# the checks have power


@each_case
def test_a_forgotten_mask_is_seen(case, monkeypatch):
    backbone = build(case)
    batch, context = make_batch(backbone), backbone.encoder.context
    monkeypatch.setattr(
        backbone.encoder,
        "context",
        lambda hidden, mask, padded: context(hidden, torch.ones_like(mask), padded),
    )
    assert gap(run(backbone, batch), reference(backbone, batch).logits) > SEEN


@pytest.mark.parametrize(
    "case", [case for case in CASES if case != "albert"]
)  # whose layers are one module
def test_swapped_layers_are_seen(case, monkeypatch):
    backbone = build(case)
    batch = make_batch(backbone)
    monkeypatch.setattr(backbone, "layers", backbone.layers[::-1])
    assert gap(run(backbone, batch), reference(backbone, batch).logits) > SEEN


@each_case
def test_careless_keeping_is_seen(case, monkeypatch):
    backbone = build(case)
    batch, rows, keep = make_batch(backbone), torch.tensor([2, 4, 0, 1, 3]), backbone.keep
    expected = reference(backbone, batch).logits[rows]

    def one_token_less(state, rows, trim):
        lengths = [min(length, max(LENGTHS) - 1) for length in state.lengths]
        return keep(state._replace(lengths=lengths), rows, trim)

    def masks_of_other_rows(state, rows, trim):
        return keep(state, rows, trim=False)._replace(context=state.context)

    for careless, row in (one_token_less, 2), (masks_of_other_rows, slice(None)):
        monkeypatch.setattr(backbone, "keep", careless)
        logits = run(backbone, batch, lambda k, state: rows if k == 1 else None)
        assert gap(logits[row], expected[row]) > SEEN


# ------------------------------------------------------------------------------------------------
# what is refused


def tiny(auto, model_type, **options):
    return auto.from_config(AutoConfig.for_model(model_type, **options))


@pytest.mark.parametrize(
    "model",
    [
        lambda: tiny(
            AutoModelForSequenceClassification,
            "gpt2",
            n_embd=8,
            n_layer=1,
            n_head=1,
            vocab_size=9,
            n_positions=9,
        ),
        lambda: tiny(AutoModel, "bert", **SMALL),
        lambda: tiny(AutoModelForSequenceClassification, "bert", is_decoder=True, **SMALL),
        lambda: torch.nn.Linear(2, 2),
        lambda: torch.nn.DataParallel(build("bert").model),
        lambda: None,
    ],
    ids=["gpt2", "no head", "decoder", "not a transformer", "wrapped", "nothing"],
)
def test_unsupported_models(model):
    with pytest.raises(TypeError) as error:
        Backbone(model())
    assert all(family in str(error.value) for family in FAMILIES)


def test_several_labels_an_input_are_refused():
    with pytest.raises(TypeError, match="several labels"):
        Backbone(
            tiny(
                AutoModelForSequenceClassification,
                "bert",
                problem_type="multi_label_classification",
                **SMALL,
            )
        )


def test_layers_come_in_order():
    backbone = build("bert")
    state = backbone.start(make_batch(backbone))
    for k in 0, 2, -1:
        with pytest.raises(ValueError, match=f"layer {k} cannot follow layer 0"):
            backbone.step(state, k)
    with pytest.raises(ValueError, match="after layer 4, not after layer 0"):
        backbone.finish(state)
    for k in 1, 2, 3, 4:
        state = backbone.step(state, k)
    with pytest.raises(ValueError, match="layer 5 cannot follow layer 4"):
        backbone.step(state, 5)


def test_shapes_are_checked():
    backbone = build("bert")
    batch = make_batch(backbone)
    with pytest.raises(ValueError, match=r"\(5, 20\).*\(5, 19\)"):
        backbone.start(batch | {"attention_mask": batch["attention_mask"][:, 1:]})


# ------------------------------------------------------------------------------------------------
# loading


def test_from_pretrained(tmp_path):
    backbone = build("albert")
    backbone.model.save_pretrained(tmp_path / "full")
    loaded = Backbone.from_pretrained(tmp_path / "full")
    batch = make_batch(backbone)
    assert (loaded.family, loaded.n_layers, loaded.hidden_size, loaded.num_labels) == (
        "albert",
        4,
        32,
        3,
    )
    assert not loaded.model.training and loaded.model.dtype == torch.float32
    assert gap(run(loaded, batch), run(backbone, batch)) == 0
    half = Backbone.from_pretrained(
        tmp_path / "full", dtype=torch.bfloat16, attn_implementation="eager"
    )
    assert half.dtype == torch.bfloat16

    backbone.model.base_model.save_pretrained(tmp_path / "headless")
    with pytest.raises(ValueError, match="no classifier.bias, classifier.weight"):
        Backbone.from_pretrained(tmp_path / "headless")
    with pytest.raises(FileNotFoundError, match="no model could be loaded from .*nowhere"):
        Backbone.from_pretrained(tmp_path / "nowhere")


# ------------------------------------------------------------------------------------------------
# families


@each_case
def test_the_longest_text_fits(case):
    backbone = build(case)
    tokens = backbone.max_tokens
    batch = make_batch(backbone, [tokens, 3], tokens + backbone.extra_padding)
    assert gap(run(backbone, batch), reference(backbone, batch).logits) < TOLERANCE
    if case in ("bert", "distilbert", "mobilebert", "mpnet", "roberta", "xlm-roberta"):
        with pytest.raises((IndexError, RuntimeError)):
            run(backbone, make_batch(backbone, [tokens + 1], tokens + backbone.extra_padding + 1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu():
    for case in CASES:
        backbone = build(case)
        batch, rows = make_batch(backbone), torch.tensor([4, 2])  # these stay on the CPU
        expected = reference(backbone, batch).logits[rows]
        try:
            backbone.model.to("cuda")
            logits = run(backbone, batch, lambda k, state: rows if k == 1 else None).cpu()
        finally:
            backbone.model.to("cpu")
        assert gap(logits, expected) < 100 * TOLERANCE
