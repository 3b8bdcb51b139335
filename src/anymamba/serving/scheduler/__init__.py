"""Continuous batching: one loop for all requests, whose replies do not depend on each other.

Reading order: `engine.py` (the loop, and a thread to run it), `continuation.py` (jobs, continuations and events),
`prefill.py` (prompts to states, one segment at a time), `decode.py` (rows that get one token each per step).

One job: `Engine.submit` queues it, `PrefillQueue` reads its prompt and hands over a `PrefilledJob`, `DecodeLoop` admits
its continuations to free slots and steps them until they end, and the `Outbox` delivers `PromptDone`, `TokenEvent` and
`SequenceDone` at the end of every round.
"""
