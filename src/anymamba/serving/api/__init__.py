"""OpenAI's API: JSON bodies to typed requests, and the engine's events to JSON responses.

Reading order: `fields.py` (how a field is read, and `ApiError`, the only way to reject a request), `requests.py` (all
fields of a request for text), `responses.py` (complete responses, and the chunks of a stream).

One request: `parse_body` turns bytes into a JSON object, `read_chat` checks its fields and returns a
`GenerationRequest`, and a `ResponseBuilder` turns the events of that request into the JSON that the client receives.
"""
