import numpy as np
import pytest
import torch

from data import loader as loader_module
from data import tokenizer
from data.format import Writer
from data.loader import Loader

BYTES, GPT2 = tokenizer.get("bytes"), tokenizer.get("gpt2")
T = 8


def shards(folder, documents, tok=BYTES, split="train"):
    with Writer(folder / f"{split}.tokens", split, tok) as writer:
        for ids in documents:
            writer.add([np.asarray(ids)])
    return folder


def make(folder, split="train", *, seq_len=T, batch=1, rows=4, **more):
    usual = dict(seq_len=seq_len, batch=batch, tokens_per_step=rows * seq_len, seed=1)
    return Loader(folder, split, **{**usual, **more})


def random_documents(seed=0, n=30, longest=20):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 257, rng.integers(1, longest)) for _ in range(n)]      # end ids inside, too


@pytest.fixture
def counting(tmp_path):
    """One document of 0, 1, 2, ...: a row's first token says which row it is."""
    return shards(tmp_path, [np.arange(1000)], GPT2)


def expected(documents, end_id):
    """Per position of the stream, by looping: token, target, where its document begins."""
    tokens, targets, begins = [], [], []
    for ids in documents:
        begins += [len(tokens)] * (len(ids) + 1)
        tokens += [*ids, end_id]
        targets += [*ids[1:], end_id, -1]
    return np.array(tokens), np.array(targets), np.array(begins)


def same(a, b):
    return all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_attributes(tmp_path):
    loader = make(shards(tmp_path, [range(10), range(20)], GPT2))
    assert (loader.vocab_size, loader.end_id, loader.tokenizer_name) == (50257, 50256, "gpt2")
    assert (loader.n_tokens, loader.n_rows) == (32, 3)


def test_shapes_and_dtypes(tmp_path):
    tokens, targets, doc_start = make(shards(tmp_path, random_documents()), batch=2).batch(0, 0)
    assert tokens.shape == targets.shape == doc_start.shape == (2, T)
    assert (tokens.dtype, targets.dtype, doc_start.dtype) == (torch.int64, torch.int64, torch.int32)


def test_every_batch_against_a_loop(tmp_path):
    """Targets and document starts of every row, where documents are shorter and longer than a row."""
    documents = random_documents()
    loader = make(shards(tmp_path, documents))
    tokens, targets, begins = expected(documents, BYTES.end_id)
    seen = set()
    for step in range(loader.n_rows // 4):
        for micro in range(4):
            batch = loader.batch(step, micro)
            [at] = [a for a in range(0, loader.n_rows * T, T)
                    if np.array_equal(tokens[a:a + T], batch.tokens[0])]
            seen.add(at)
            assert batch.targets[0].tolist() == targets[at:at + T].tolist()
            starts = np.maximum(begins[at:at + T] - at, 0)
            found = batch.doc_start
            assert found is None if not starts.any() else found[0].tolist() == starts.tolist()
    assert len(seen) == loader.n_rows // 4 * 4


def test_boundary_at_every_place_in_a_row(tmp_path):
    for n in range(1, 2 * T + 2):
        documents = [range(n), range(100, 100 + 3 * T)]
        (tmp_path / str(n)).mkdir()
        folder = shards(tmp_path / str(n), documents)
        tokens, targets, begins = expected(documents, BYTES.end_id)
        for at, batch in enumerate(make(folder).sequential()):
            real = min(T, len(tokens) - 1 - at * T)
            row = slice(at * T, at * T + real)
            assert batch.targets[0, :real].tolist() == targets[row].tolist()
            if batch.doc_start is not None:
                assert batch.doc_start[0, :real].tolist() == np.maximum(begins[row] - at * T, 0).tolist()
            else:
                assert begins[row].max() <= at * T


def test_a_document_may_contain_the_end_id(tmp_path):
    text = [5, GPT2.end_id, 6, GPT2.end_id, GPT2.end_id, 7, 8]
    batch = next(make(shards(tmp_path, [text, range(30)], GPT2)).sequential())
    assert batch.targets[0].tolist() == [GPT2.end_id, 6, GPT2.end_id, GPT2.end_id, 7, 8, GPT2.end_id, -1]
    assert batch.doc_start is None                              # one document, however many end ids


def test_document_mask_off_keeps_the_targets(tmp_path):
    folder = shards(tmp_path, random_documents())
    masked, open_ = (make(folder, document_mask=mask) for mask in (True, False))
    assert all(open_.batch(s, m).doc_start is None for s in range(2) for m in range(4))
    assert any(masked.batch(s, m).doc_start is not None for s in range(2) for m in range(4))
    assert all(torch.equal(masked.batch(s, 0).targets, open_.batch(s, 0).targets) for s in range(8))


def test_each_row_once_an_epoch_in_a_fresh_order(counting):
    loader = make(counting, rows=1)
    n = loader.n_rows
    orders = [[int(loader.batch(e * n + i, 0).tokens[0, 0]) for i in range(n)] for e in range(3)]
    for order in orders:
        assert sorted(order) == list(range(0, n * T, T))
    assert orders[0] != orders[1] != orders[2] != sorted(orders[2])


def test_each_token_once_an_epoch_when_steps_straddle_epochs(counting):
    loader = make(counting, batch=2, rows=6)                    # 125 rows: not a multiple of 6
    batches = [loader.batch(step, micro) for step in range(125) for micro in range(3)]
    rows = [int(row[0]) for batch in batches for row in batch.tokens]
    for epoch in range(6):
        assert sorted(rows[epoch * 125:(epoch + 1) * 125]) == list(range(0, 1000, T))


def test_same_arguments_same_batch_whatever_came_before(tmp_path):
    folder = shards(tmp_path, random_documents())
    a, b = make(folder, batch=2), make(folder, batch=2)
    forwards = {step: a.batch(step, 1) for step in range(50)}
    loader_module._permutation.cache_clear()
    assert all(same(b.batch(step, 1), forwards[step]) for step in reversed(range(50)))


def test_far_step_is_a_seek(counting):
    assert make(counting).batch(10**9, 3).tokens.shape == (1, T)


def test_seed_changes_the_order(counting):
    first = [[int(make(counting, seed=seed).batch(0, m).tokens[0, 0]) for m in range(4)] for seed in range(5)]
    assert len(set(map(tuple, first))) == 5


@pytest.mark.parametrize("world, batch", [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (4, 3), (1, 12)])
def test_rows_of_a_step_depend_neither_on_world_nor_on_accumulation(counting, world, batch):
    whole = make(counting, batch=12, rows=12).batch(7, 0)
    loader = make(counting, batch=batch, rows=12)
    micro_steps = 12 // (world * batch)
    parts = [loader.batch(7, micro, rank, world) for micro in range(micro_steps) for rank in range(world)]
    assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)


# ---- evaluation

@pytest.mark.parametrize("world, batch, max_tokens", [
    (1, 1, None), (1, 3, None), (2, 2, None), (3, 4, None), (1, 2, 53), (2, 2, 64), (1, 1, 10**9), (1, 1, 1)])
def test_sequential_covers_every_target_once(tmp_path, world, batch, max_tokens):
    documents = random_documents()
    loader = make(shards(tmp_path, documents), batch=batch, rows=batch)
    _, targets, _ = expected(documents, BYTES.end_id)
    per_rank = [list(loader.sequential(max_tokens, rank, world)) for rank in range(world)]
    assert len(set(map(len, per_rank))) == 1
    rows = torch.cat([part.targets for parts in zip(*per_rank, strict=True) for part in parts])
    assert rows.shape[1] == T and len(rows) % batch == 0
    stop = min(len(targets) - 1, max_tokens or len(targets))
    flat = rows.flatten().tolist()
    assert flat[:stop] == targets[:stop].tolist()
    assert set(flat[stop:]) <= {-1}


def test_sequential_pads_a_split_shorter_than_a_row(tmp_path):
    [batch] = make(shards(tmp_path, [[1, 2, 3]], split="val"), "val").sequential()
    assert batch.tokens[0].tolist() == [1, 2, 3] + [256] * 5
    assert batch.targets[0].tolist() == [2, 3, 256] + [-1] * 5
    assert batch.doc_start is None


# ---- errors

def test_sequence_longer_than_the_data(tmp_path):
    folder = shards(tmp_path, [[1] * 99])
    shards(tmp_path, [[1] * 99], split="val")
    with pytest.raises(ValueError, match="seq_len=1024 needs 1025 tokens.* only 100"):
        make(folder, seq_len=1024)
    with pytest.raises(ValueError, match="seq_len=100 needs 101 tokens.* only 100"):
        make(folder, "val", seq_len=100).batch(0, 0)
    assert make(folder, seq_len=99).n_rows == 1


@pytest.mark.parametrize("change, message", [
    (dict(seq_len=0, tokens_per_step=8), "seq_len=0 must be positive"),
    (dict(batch=0), "batch=0 must be positive"),
    (dict(tokens_per_step=0), "tokens_per_step=0 must be positive"),
    (dict(seed=-1), "seed=-1 must not be negative"),
    (dict(tokens_per_step=12), "tokens_per_step=12 must be a multiple of batch . seq_len = 8"),
], ids=lambda v: "")
def test_numbers_that_do_not_fit(counting, change, message):
    with pytest.raises(ValueError, match=message):
        make(counting, **change)


@pytest.mark.parametrize("where, message", [
    (dict(step=0, micro=4), "micro=4"),
    (dict(step=-1, micro=0), "step=-1"),
    (dict(step=0, micro=-1), "micro=-1"),
    (dict(step=0, micro=0, rank=2, world=2), "rank=2"),
    (dict(step=0, micro=0, rank=0, world=3), "4 rows must be a multiple of batch . world = 3"),
], ids=lambda v: "")
def test_batches_that_do_not_exist(counting, where, message):
    with pytest.raises(ValueError, match=message):
        make(counting).batch(**where)


def test_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="train.tokens.*data.prepare"):
        make(tmp_path)


def test_token_beyond_the_vocabulary_is_an_error(counting):
    loader = make(counting)
    with open(loader.shard.path, "r+b") as file:
        file.seek(4096 + 2 * 500)
        file.write(b"\xff\xff")
    with pytest.raises(ValueError, match="damaged: token 65535 near position .* vocab_size=50257"):
        list(loader.sequential())


def test_memory_does_not_grow_with_what_was_read(tmp_path):
    """10,000 batches that together touch every page of an 80 MB shard."""
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    loader = make(shards(tmp_path, [np.ones(8_000, np.uint16)] * 5_000), seq_len=4_000, rows=1)
    loader.batch(0, 0)
    before = resident()
    for step in range(10_000):
        loader.batch(step, 0)
    assert resident() - before < 30e6
    # The measure works: a map that stays open and is read through does count.
    lasting = loader.shard.tokens()
    assert lasting.max() == 256 and resident() - before > 60e6
