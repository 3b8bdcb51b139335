import pytest
import torch

from anymamba.generation.scoring import score_text
from tests.models.cases import FAMILIES, small_lm


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("segment_len", "length"), [(1, 60), (7, 300), (130, 300), (1000, 300)])
def test_pieces_and_segments_do_not_matter(family, segment_len, length):
    model, ids = small_lm(family), torch.randint(61, (1, length))
    expected = model(ids, labels=ids).loss.item() * (length - 1)
    segments = [part.tolist() for part in ids[0].split([1, 0, length // 2, length // 2 - 1])]
    *_, score = score_text(model, segments, segment_len)
    assert score.nats == pytest.approx(expected, rel=1e-5)
    assert (score.predicted, score.read) == (length - 1, length)


def test_nothing_to_read_gives_nothing():
    assert list(score_text(small_lm(), [[]])) == []
