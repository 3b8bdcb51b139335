import itertools
import json
import lzma
import os
import re

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from anymamba.core.io import digest_file, run_lock
from anymamba.generation.tokenizers import ByteTokenizer
from anymamba.models.loss import IGNORED_LABEL
from anymamba.training.data.batches import Batches, Sequence, permute_indices, segments
from anymamba.training.data.documents import sample, split
from anymamba.training.data.shards import open_corpus, prepare
from anymamba.training.data.sources import find_documents
from anymamba.training.tasks.language_model import batch_loss_sum
from tests.models.cases import small_lm
from tests.support import assert_near
from tests.training.cases import LENGTHS, tiny, write_corpus


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


def prepare_data(corpus, directory, **data):
    return prepare(tiny(corpus, data=data).data, directory, ByteTokenizer())


def find(source):
    return find_documents((str(source),), "text").documents


def batches(tokens, mode="packed", seed=0, rows=4, length=32, accumulation=1):
    return Batches(tokens, mode=mode, length=length, rows=rows, accumulation=accumulation, seed=seed)


class Gaps:
    """A tokenizer whose highest id is larger than its number of tokens suggests."""

    vocab_size, end = 256, []

    def encode(self, text, add_special_tokens=False):
        return [3, 300]

    def decode(self, ids):
        raise NotImplementedError


class TestCorpus:
    def test_shards_hold_every_document_once(self, corpus, tmp_path):
        splits = prepare_data(corpus, tmp_path / "data", shard_tokens=300)
        train, held_out = split(find(corpus), 0.1, b"")
        assert len(splits.train.parts) > 2
        for tokens, documents in ((splits.train, train), (splits.held_out, held_out)):
            text = b"".join(document.read(b"") for document in documents)
            assert bytes(tokens.read(0, tokens.total).tolist()) == text
        assert splits.xz_bytes == len(lzma.compress(text, preset=9))

    def test_the_split_is_by_name_and_leaves_no_side_empty(self, corpus, tmp_path):
        documents = find(corpus)
        train, held_out = split(documents, 0.3, b"")
        moved = write_corpus(tmp_path / "elsewhere")
        again = split(find(moved), 0.3, b"")[1]
        assert [d.name for d in held_out] == [d.name for d in again]
        assert {d.name for d in train}.isdisjoint(d.name for d in held_out)
        for fraction in (1e-9, 1 - 1e-9):
            assert all(sum(d.size(b"") for d in side) >= 2 for side in split(documents, fraction, b""))

    @pytest.mark.parametrize("fraction", [0.02, 0.3, 0.9])
    @pytest.mark.parametrize("lines", [True, False])
    @pytest.mark.parametrize("sizes", [(5_400_000, 5_400), (900, 40_000, 700), (1000,) * 40, (501,), (10, 10)])
    def test_about_the_requested_share_of_the_bytes_is_held_out_and_nothing_twice(
        self, tmp_path, sizes, lines, fraction
    ):
        texts = [("äöü\U0001f600x" * size)[:size] for size in sizes]
        if lines:
            (tmp_path / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        else:
            for i, text in enumerate(texts):
                (tmp_path / f"{i}.txt").write_text(text)
        documents = find(tmp_path)
        sides = split(documents, fraction, b"")
        total, held_out = (sum(d.size(b"") for d in side) for side in (documents, sides[1]))
        assert fraction / 2 <= held_out / total <= fraction + 5 / total
        parts = sorted((d.name, d.begin, d.read(b"").decode()) for side in sides for d in side)
        assert sorted(
            "".join(x for name, _, x in parts if name.removesuffix(" (end)") == d.name) for d in documents
        ) == (sorted(texts))

    @pytest.mark.parametrize("most", [0, 1, 700, 10**6])
    def test_a_sample_has_at_most_as_many_bytes_as_asked_for(self, corpus, most):
        parts = sample(find(corpus), b"", most)
        assert sum(map(len, parts)) == min(most, sum(LENGTHS))
        assert all(part in {d.read(b"") for d in find(corpus)} for part in parts[:-1])

    def test_how_much_is_held_out_is_reported(self, corpus, tmp_path):
        told = []
        prepare(tiny(corpus).data, tmp_path / "data", ByteTokenizer(), told.append)
        held_out = split(find(corpus), 0.1, b"")[1]
        size = sum(d.size(b"") for d in held_out)
        assert f"bytes; held out: {len(held_out)} document" in told[0]
        assert told[0].endswith(f" {size:,} bytes")
        assert told[0].startswith("to train on: ")
        assert f"{sum(LENGTHS) - size:,} bytes;" in told[0]
        prepare(tiny(corpus / "document0.txt").data, tmp_path / "one", ByteTokenizer(), told.append)
        assert "to train on: 1 document, 630 bytes; held out: the end of a document, 70 bytes" in told

    def test_shards_of_other_text_are_kept(self, corpus, tmp_path):
        shared = {"shards": str(tmp_path / "data")}
        before = prepare_data(corpus, tmp_path / "data", **shared)
        (tmp_path / "other.txt").write_text("other " * 100)
        with pytest.raises(ValueError, match=r"expected tokenized text of the same sources, .* found that of others"):
            prepare_data(tmp_path / "other.txt", tmp_path / "data", **shared)
        assert open_corpus(tmp_path / "data").checksum == before.checksum
        assert prepare_data(corpus, tmp_path / "data", **shared).checksum == before.checksum

    def test_shards_that_another_process_writes_are_not_touched(self, corpus, tmp_path):
        (tmp_path / "data").mkdir()
        with run_lock(tmp_path / "data"), pytest.raises(ValueError, match="another process is using this run"):
            prepare_data(corpus, tmp_path / "data")
        prepare_data(corpus, tmp_path / "data")
        with run_lock(tmp_path / "data"):
            prepare_data(corpus, tmp_path / "data")

    def test_ids_beyond_the_vocabulary_are_rejected(self, corpus, tmp_path):
        with pytest.raises(ValueError, match=r"document\d.txt: expected token ids below 256, .* got 300"):
            prepare(tiny(corpus).data, tmp_path / "data", Gaps())

    def test_one_document_is_cut_between_characters(self, tmp_path):
        (tmp_path / "one.txt").write_text("ä" * 501)
        (begin,), (end,) = split(find(tmp_path / "one.txt"), 0.25, b"")
        assert begin.read(b"").decode() + end.read(b"").decode() == "ä" * 501

    def test_tokenizing_continues_where_it_stopped(self, corpus, tmp_path, monkeypatch):
        whole = prepare_data(corpus, tmp_path / "whole", shard_tokens=300)
        from anymamba.training.data import shards

        written = []

        def fail_at_third(path, tensors, metadata, write=shards.write_tensors):
            if len(written) == 2:
                raise OSError(28, "No space left on device")
            written.append(path)
            write(path, tensors, metadata)

        monkeypatch.setattr(shards, "write_tensors", fail_at_third)
        with pytest.raises(OSError, match="No space"):
            prepare_data(corpus, tmp_path / "data", shard_tokens=300)
        monkeypatch.undo()
        files = sorted((tmp_path / "data").glob("train-*.safetensors"))
        assert len(files) == 2
        times = [path.stat().st_mtime_ns for path in files]
        assert prepare_data(corpus, tmp_path / "data", shard_tokens=300).checksum == whole.checksum
        assert [path.stat().st_mtime_ns for path in files] == times

    def test_a_damaged_shard_is_named(self, corpus, tmp_path):
        prepare_data(corpus, tmp_path / "data")
        file = tmp_path / "data" / "train-00000.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"train-00000.*: damaged"):
            open_corpus(tmp_path / "data")

    def test_a_shard_that_is_cut_short_while_it_is_read_is_an_error(self, corpus, tmp_path):
        """In a mapped file, reading beyond its end would end the process."""
        text = prepare_data(corpus, tmp_path / "data").train
        file = tmp_path / "data" / "train-00000.safetensors"
        tokens = text.read(0, text.total)
        os.truncate(file, file.stat().st_size // 2)
        with pytest.raises(ValueError, match=r"train-00000\.safetensors: tokens should have .* the file was cut short"):
            text.read(text.total - 2, text.total)
        assert torch.equal(text.read(0, 2), tokens[:2])

    @pytest.mark.parametrize(
        "damage",
        [
            {"train": 3},
            {"train": [3]},
            {"train": [{}]},
            {"train": [{"file": "../train-00000.safetensors", "documents": 1, "tokens": 1, "blake2b": "x"}]},
            {"train": [{"file": 7, "documents": 1, "tokens": 1, "blake2b": "x"}]},
            {"held_out": None},
            {"held_out": []},
            {"train": []},
            {"xz_bytes": "many"},
            {"vocab_size": None},
        ],
        ids=str,
    )
    def test_a_damaged_index_is_named(self, corpus, tmp_path, damage):
        prepare_data(corpus, tmp_path / "data")
        index = tmp_path / "data" / "index.json"
        whole = json.loads(index.read_text())
        for table in ({**whole, **damage}, {name: x for name, x in whole.items() if name not in damage}):
            index.write_text(json.dumps(table))
            with pytest.raises(ValueError, match=r"index\.json: damaged: "):
                open_corpus(tmp_path / "data")

    @pytest.mark.parametrize(
        "damage",
        [
            {"tokens": torch.zeros(8)},
            {"tokens": torch.zeros(2, 4, dtype=torch.uint8)},
            {"tokens": torch.zeros(7, dtype=torch.uint8)},
            {"lengths": torch.tensor([8])},
            {"lengths": torch.tensor([4.0, 4.0])},
            {"sizes": torch.tensor([8])},
        ],
        ids=str,
    )
    def test_a_shard_whose_parts_do_not_fit_together_is_named(self, corpus, tmp_path, damage):
        """Whoever wrote its checksum."""
        prepare_data(corpus, tmp_path / "data")
        lengths = torch.tensor([3, 5])
        whole = {"tokens": torch.zeros(8, dtype=torch.uint8), "lengths": lengths, "sizes": lengths.clone()}
        file, index = (tmp_path / "data" / name for name in ("train-00000.safetensors", "index.json"))
        table = json.loads(index.read_text())
        for tensors in (whole, {**whole, **damage}):
            save_file(tensors, file)
            table["train"][0]["blake2b"] = digest_file(file)
            index.write_text(json.dumps(table))
            if tensors is whole:
                assert open_corpus(tmp_path / "data").train.total == 8
        message = "its documents are not as long|expected a vector of tokens"
        with pytest.raises(ValueError, match=rf"train-00000\.safetensors: damaged: ({message})"):
            open_corpus(tmp_path / "data")

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b"{", "not readable JSON"),
            (b"\xff\xfe\xfd", "not readable JSON"),
            (b"[" * 10**5, "nested too deeply"),
            (b'{"text": ' + b"9" * 5000 + b"}", "not readable JSON"),
            (b'{"text": 3}', 'expected an object with a text "text", got'),
            (b'{"text": "\\ud800"}', "has half a character"),
        ],
        ids=lambda x: repr(x)[:20],
    )
    def test_an_odd_line_is_named(self, tmp_path, line, message):
        file = tmp_path / "lines.jsonl"
        file.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
        listing = find_documents((str(file),), "text")
        assert len(listing.documents) == 1
        assert re.search(rf"lines\.jsonl:2: .*{message}", *listing.problems)

    def test_changed_text_is_tokenized_again(self, corpus, tmp_path):
        before = prepare_data(corpus, tmp_path / "data")
        (corpus / "more.txt").write_text("more")
        assert prepare_data(corpus, tmp_path / "data").checksum != before.checksum


class TestOrder:
    @pytest.mark.parametrize("count", [1, 2, 3, 63, 100, 1025])
    def test_a_permutation_is_one(self, count):
        for epoch in range(3):
            assert sorted(permute_indices(np.arange(count), count, 7, epoch)) == list(range(count))

    def test_permutations_differ_by_seed_and_epoch(self):
        orders = [tuple(permute_indices(np.arange(50), 50, seed, epoch)) for seed in range(3) for epoch in range(3)]
        assert len(set(orders)) == 9

    @pytest.mark.parametrize("mode", ["packed", "stream"])
    def test_the_order_is_a_function_of_seed_and_step_alone(self, corpus, tmp_path, mode):
        tokens = prepare_data(corpus, tmp_path / "data").train
        a, b, other = (batches(tokens, mode, seed) for seed in (5, 5, 6))
        forward = [a.step(i)[0] for i in range(40)]
        for i in reversed(range(40)):
            assert all(torch.equal(x, y) for x, y in zip(forward[i][:5], b.step(i)[0][:5], strict=True))
        assert any(not torch.equal(forward[i].inputs, other.step(i)[0].inputs) for i in range(40))

    def test_an_epoch_shows_every_row_once(self, corpus, tmp_path):
        tokens = prepare_data(corpus, tmp_path / "data").train
        count = tokens.total // 32
        inputs = batches(tokens, rows=count).step(1)[0].inputs.view(count, 32)
        assert sorted(inputs.tolist()) == sorted(tokens.read(0, count * 32).view(count, 32).tolist())

    def test_accumulation_reads_the_same_rows(self, corpus, tmp_path):
        tokens = prepare_data(corpus, tmp_path / "data").train
        whole, parts = batches(tokens).step(3), batches(tokens, accumulation=2).step(3)
        assert torch.equal(whole[0].inputs, torch.cat([part.inputs for part in parts], 1))

    def test_too_little_text_says_how_much_is_needed(self, corpus, tmp_path):
        tokens = prepare_data(corpus, tmp_path / "data").train
        with pytest.raises(ValueError, match=f"expected at least 99999 tokens .*got {tokens.total}"):
            batches(tokens, length=99999)


def by_document(sequence, begin, end):
    """Return the parts of documents between two offsets, with their targets."""
    ids, starts = sequence.span(begin, end)
    cuts = sorted({0, *starts.tolist(), len(ids)})
    return [ids[a:b] for a, b in itertools.pairwise(cuts)]


class TestPacking:
    @pytest.mark.parametrize("family", ["Mamba2", "Mamba3"])
    def test_packed_rows_equal_separate_documents_in_loss_and_gradients(self, corpus, tmp_path, family):
        tokens = prepare_data(corpus, tmp_path / "data").train
        sequence = Sequence(tokens)
        model = small_lm(family, torch.float64, vocab_size=256)
        spans = [(start, start + 150) for start in (0, 620, 1000)]
        batch = sequence.pack(spans, True)
        nats, _ = batch_loss_sum(model, batch, None, torch.float64)
        nats.backward()
        packed = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        count = 0
        for begin, end in spans:
            reached = 0
            for document in by_document(sequence, begin, end + 1):
                kept = min(len(document), end - begin - reached)  # the row's inputs; one token more is a target
                reached += len(document)
                if kept < 1 or len(document) < 2:
                    continue
                targets = document[1 : kept + 1]
                logits = model(document[:kept].unsqueeze(0)).logits[0, : len(targets)]
                total = total + torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
                count += len(targets)
        total.backward()
        assert batch.loss_terms == count
        assert_near(nats, total, 1e-12)
        for name, parameter in model.named_parameters():
            assert_near(packed[name], parameter.grad, 1e-9, name)

    @pytest.mark.parametrize("family", ["Mamba2", "Mamba3", "Mamba3 MIMO"])
    def test_streams_carry_what_one_long_forward_computes(self, corpus, tmp_path, family):
        tokens = prepare_data(corpus, tmp_path / "data").train
        model = small_lm(family, torch.float64, vocab_size=256)
        source, nats, carried = batches(tokens, "stream", rows=3, length=20), 0.0, None
        steps = tokens.total // 3 // 20
        lane = tokens.total // 3
        with torch.no_grad():
            for step in range(steps):
                (batch,) = source.step(step)
                cost, carried = batch_loss_sum(model, batch, carried, torch.float64)
                nats += cost.item()
            order = torch.from_numpy(permute_indices(np.arange(len(tokens.lengths)), len(tokens.lengths), 0, 0))
            sequence = Sequence(tokens, order)
            whole = sequence.pack([(row * lane, row * lane + steps * 20) for row in range(3)], True)
            expected, state = batch_loss_sum(model, whole, None, torch.float64)
        assert nats == pytest.approx(expected.item(), rel=1e-12)
        for name, tensor in state.tensors().items():
            assert_near(carried.tensors()[name], tensor, 1e-9, name)

    def test_segments_read_everything_once_and_carry_their_state(self, corpus, tmp_path):
        tokens = prepare_data(corpus, tmp_path / "data").train
        model = small_lm("Mamba3", torch.float64, vocab_size=256)
        costs = []
        for length in (50, 10_000):
            total, carried, read = 0.0, None, []
            for batch in segments(tokens, length):
                cost, carried = batch_loss_sum(model, batch, carried, torch.float64)
                total += cost.item()
                read += batch.inputs[0].tolist()
            assert read == tokens.read(0, tokens.total).tolist()
            costs.append(total)
        assert costs[0] == pytest.approx(costs[1], rel=1e-12)

    def test_the_end_of_a_document_is_not_a_target(self, corpus, tmp_path):
        tokens = prepare_data(corpus, tmp_path / "data").train
        (batch,) = segments(tokens, tokens.total)
        ends = tokens.lengths.cumsum(0) - 1
        ignored = (batch.targets[0] == IGNORED_LABEL).nonzero().flatten()
        assert ignored.tolist() == ends.tolist()
