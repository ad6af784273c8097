"""OpenAI's wire format for gateway and worker: what may be asked, how answers and errors look."""

from twofold.live.openai.answer import (
    DONE,
    AnswerBuilder,
    TokenLogprob,
    Usage,
    chat_logprobs,
    completion_logprobs,
    models_body,
)
from twofold.live.openai.errors import ApiError, error_body, error_event
from twofold.live.openai.request import (
    HOP_FIELDS,
    GenerateRequest,
    Kind,
    Message,
    check_request,
    decode_object,
    parse_request,
)

__all__ = [
    "DONE",
    "HOP_FIELDS",
    "AnswerBuilder",
    "ApiError",
    "GenerateRequest",
    "Kind",
    "Message",
    "TokenLogprob",
    "Usage",
    "chat_logprobs",
    "check_request",
    "completion_logprobs",
    "decode_object",
    "error_body",
    "error_event",
    "models_body",
    "parse_request",
]
