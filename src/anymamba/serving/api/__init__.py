"""OpenAI's API: JSON bodies to typed requests, and the engine's events to JSON responses.

Reading order: `errors.py` (`ApiError`, the only way to reject a request), `requests.py` (checks every field of a body),
`responses.py` (complete responses, and the chunks of a stream).

One request: `parse_body` turns bytes into a JSON object, `read_chat` checks its fields and returns a
`GenerationRequest`, and a `ResponseBuilder` turns the events of that request into the JSON that the client receives.
"""
