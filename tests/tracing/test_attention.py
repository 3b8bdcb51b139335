import torch

from anymamba.blocks import Attention
from tests.support import FLOOR, assert_near


def test_a_sequence_of_any_length_is_one_graph():
    block = Attention(16, num_heads=4, num_heads_kv=2, rotary_emb_dim=4, dtype=torch.float64)
    graph = torch.compile(block, fullgraph=True, backend="eager", dynamic=True)
    for t in (5, 1, 9):
        x = torch.randn(2, t, 16, dtype=torch.float64)
        assert_near(graph(x), block(x), FLOOR[torch.float64])
