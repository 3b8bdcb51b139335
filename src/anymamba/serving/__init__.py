"""Serving: an HTTP server with OpenAI's API, whose conversations take the same memory at any length.

Reading order: `server.py` (the process), `middleware.py` (which requests are accepted), `routes.py` (HTTP in and out),
`api/` (JSON to requests, and events to JSON), `service.py` (from a request to its jobs), `prompts.py` (what of a prompt
is read), `state_cache.py` and `sessions.py` (states between requests), `state_cache_disk.py` (their files),
`scheduler/` (the loop that computes), `metrics.py`, `embeddings.py` (models that give vectors), and `load_test/`
(`anymamba bench-serve`, which needs none of the others).

One chat request: `AccessMiddleware` checks its headers. `Routes` reads the body into a `GenerationRequest` and starts
`Service.handle`, which renders and tokenizes the conversation into a `ChatPrompt` and submits a `Job` to the `Engine`.
The job's prefill begins with the longest cached state (`StateCache`); its continuation then gets one token per step,
together with those of other requests. Each token comes back as a `TokenEvent`, which `ResponseBuilder` turns into a
chunk of the stream. At the end the state after the reply is cached, or committed to the session (`SessionStore`).
"""
