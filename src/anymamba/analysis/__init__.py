"""What a block or a model does with a text: the matrix of a scan, what it remembers and for how long, how
likely each token was.

The scan of every family is one recurrence, and everything here is derived from it. Functions of a block take the block
and its input, `half_lives(block, x)`; `layers(model, ids)` returns the blocks of a model with their inputs.
`anymamba inspect` builds a page from all of them. The package is also importable as `anymamba.inspect`.

In reading order: `recurrence.py` (the inputs of a scan, in one form for all families), `dual.py` (the matrix that a
scan applies to its values), `measures.py` (half-lives, norms, ranks), `layer_inputs.py` (blocks and inputs of a model,
likelihoods of a text), `report_data.py` (all of this as JSON, in one HTML page), `page/` (the scripts that draw it).

A text on its way to a page: `layer_inputs` runs the model once and keeps the input x of every block; `recurrence`
lets each block compute v, k, q, log-decays and step sizes from x; `dual` turns them into a matrix per head and
`measures` into numbers per token; `report_data` rounds and packs both; `render_page` embeds them in one HTML file.
"""

from anymamba.analysis.dual import dual_matrix as dual_matrix
from anymamba.analysis.dual import flatten_ranks as flatten_ranks
from anymamba.analysis.dual import initial_state_term as initial_state_term
from anymamba.analysis.dual import unflatten_ranks as unflatten_ranks
from anymamba.analysis.dual import values as values
from anymamba.analysis.layer_inputs import Layer as Layer
from anymamba.analysis.layer_inputs import TokenScores as TokenScores
from anymamba.analysis.layer_inputs import layers as layers
from anymamba.analysis.layer_inputs import token_scores as token_scores
from anymamba.analysis.measures import StateMeasures as StateMeasures
from anymamba.analysis.measures import effective_rank as effective_rank
from anymamba.analysis.measures import half_lives as half_lives
from anymamba.analysis.measures import horizons as horizons
from anymamba.analysis.measures import rotation_angles as rotation_angles
from anymamba.analysis.measures import state_measures as state_measures
from anymamba.analysis.measures import step_caches as step_caches
from anymamba.analysis.measures import step_sizes as step_sizes
from anymamba.analysis.recurrence import Recurrence as Recurrence
from anymamba.analysis.recurrence import recurrence as recurrence
from anymamba.analysis.recurrence import register_recurrence as register_recurrence
from anymamba.renamed import renamed_attributes

__getattr__ = renamed_attributes(
    __name__,
    {
        "by_rows": "flatten_ranks",
        "caches": "step_caches",
        "carried": "initial_state_term",
        "from_rows": "unflatten_ranks",
        "turns": "rotation_angles",
    },
)
