"""Look inside a block or a model: the matrix of a scan, what it remembers and for how long, what a text costs.

Functions of a block take it and its input, `half_lives(block, x)`; `layers(model, ids)` gives the blocks and inputs of
a model. `anymamba inspect` makes a page from all of them.
"""

from anymamba.inspect.dual import by_rows as by_rows
from anymamba.inspect.dual import carried as carried
from anymamba.inspect.dual import dual_matrix as dual_matrix
from anymamba.inspect.dual import from_rows as from_rows
from anymamba.inspect.dual import values as values
from anymamba.inspect.measures import StateMeasures as StateMeasures
from anymamba.inspect.measures import caches as caches
from anymamba.inspect.measures import effective_rank as effective_rank
from anymamba.inspect.measures import half_lives as half_lives
from anymamba.inspect.measures import horizons as horizons
from anymamba.inspect.measures import state_measures as state_measures
from anymamba.inspect.measures import step_sizes as step_sizes
from anymamba.inspect.measures import turns as turns
from anymamba.inspect.models import Layer as Layer
from anymamba.inspect.models import TokenScores as TokenScores
from anymamba.inspect.models import layers as layers
from anymamba.inspect.models import token_scores as token_scores
from anymamba.inspect.recurrence import Recurrence as Recurrence
from anymamba.inspect.recurrence import recurrence as recurrence
