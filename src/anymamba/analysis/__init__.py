"""Look inside a block or a model: the matrix of a scan, what it remembers and for how long, what a text costs.

Functions of a block take it and its input, `half_lives(block, x)`; `layers(model, ids)` gives the blocks and inputs of
a model. `anymamba inspect` makes a page from all of them.
"""

from anymamba.analysis.dual import by_rows as by_rows
from anymamba.analysis.dual import carried as carried
from anymamba.analysis.dual import dual_matrix as dual_matrix
from anymamba.analysis.dual import from_rows as from_rows
from anymamba.analysis.dual import values as values
from anymamba.analysis.layer_inputs import Layer as Layer
from anymamba.analysis.layer_inputs import TokenScores as TokenScores
from anymamba.analysis.layer_inputs import layers as layers
from anymamba.analysis.layer_inputs import token_scores as token_scores
from anymamba.analysis.measures import StateMeasures as StateMeasures
from anymamba.analysis.measures import caches as caches
from anymamba.analysis.measures import effective_rank as effective_rank
from anymamba.analysis.measures import half_lives as half_lives
from anymamba.analysis.measures import horizons as horizons
from anymamba.analysis.measures import state_measures as state_measures
from anymamba.analysis.measures import step_sizes as step_sizes
from anymamba.analysis.measures import turns as turns
from anymamba.analysis.recurrence import Recurrence as Recurrence
from anymamba.analysis.recurrence import recurrence as recurrence
