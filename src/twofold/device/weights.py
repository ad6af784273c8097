"""Loading models: a Hugging Face decoder directory or a GGUF file, on our attention."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from twofold.device.attention import ATTENTION, register
from twofold.device.digest import digest_files
from twofold.device.errors import ModelError
from twofold.device.pool import DTYPES
from twofold.device.probe import Shape, probe
from twofold.types import PROTOCOL_VERSION, KVLayout

__all__ = ["LoadedModel", "ModelError", "layout_of", "load_model", "quiet"]

_WEIGHT_PATTERNS: Final = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_MESSAGE_CHARS: Final = 300
_LAYER_TYPES: Final = ("full_attention", "sliding_attention")
_BATCH_DEPENDENT_ROPE: Final = ("dynamic", "longrope")


class LoadedModel:
    """A model on its device, in evaluation mode, with our attention.

    `max_len` is the longest sequence that its positions are made for, 0 if it does not say.
    """

    def __init__(
        self, path: Path, model: Any, shape: Shape, dtype: str, device: torch.device
    ) -> None:
        config = model.config.get_text_config()
        self.path: Final = path
        self.model: Final = model
        self.shape: Final = shape
        self.dtype: Final = dtype
        self.device: Final = device
        self.vocab_size: Final[int] = model.get_output_embeddings().weight.shape[0]
        self.max_len: Final[int] = getattr(config, "max_position_embeddings", 0) or 0
        self.eos_token_ids: Final = _eos_token_ids(model)
        self.rope: Final = _rope(config)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from writing progress bars, logs and warnings to the terminal."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def load_model(path: Path | str, *, dtype: str = "float32", device: str = "cpu") -> LoadedModel:
    """Load the model at `path`: a directory with config.json, or a `.gguf` file.

    Nothing is fetched from a network and no code of the model's own is run. Raises ModelError.
    """
    path = Path(path)
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    target = _device(device)
    with quiet():
        register()
        if path.is_file() and path.suffix == ".gguf":
            model, info = _load_gguf(path, dtype)
        else:
            _check_directory(path)
            model, info = _load_directory(path, dtype)
        _check_loaded(path, info)
        model = model.to(target).eval()
        layers = model.config.get_text_config().num_hidden_layers
        try:
            shape = probe(model, layers, target)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ModelError(f"{path}: {_line(error)}") from error
    return LoadedModel(path, model, shape, dtype, target)


def layout_of(loaded: LoadedModel, *, block_size: int, engine: str = "twofold") -> KVLayout:
    """What a peer must share to read this model's KV cache. Reads files: see `digest`."""
    path = loaded.path
    if path.is_file():
        weights = tokenizer = [path]
    else:
        weights = [path / "config.json", *_weight_files(path)]
        tokenizer = [path / name for name in _TOKENIZER_FILES if (path / name).is_file()]
    return KVLayout(
        protocol=PROTOCOL_VERSION,
        engine=engine,
        model_digest=digest_files(weights),
        tokenizer_digest=digest_files(tokenizer),
        dtype=loaded.dtype,
        block_size=block_size,
        layers=loaded.shape.layers,
        kv_heads=loaded.shape.kv_heads,
        head_dim=loaded.shape.head_dim,
        rope=loaded.rope,
    )


def _line(error: Exception) -> str:
    """An error's text on one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MESSAGE_CHARS else text[:_MESSAGE_CHARS] + "..."


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {name!r} cannot be used: {_line(error)}") from error
    return device


def _weight_files(path: Path) -> list[Path]:
    """Weights in the first format found, since a directory may carry the same ones twice."""
    for pattern in _WEIGHT_PATTERNS:
        files = sorted(path.glob(pattern))
        if files:
            return files
    return []


def _check_directory(path: Path) -> None:
    if not path.is_dir():
        raise ModelError(f"{path}: no such model directory or .gguf file")
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"{path}: has no config.json, so it is no Hugging Face model directory")
    try:
        config = json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelError(f"{file}: not valid JSON: {_line(error)}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(f"{file}: has no model_type")
    if not _weight_files(path):
        raise ModelError(f"{path}: has no weights (*.safetensors)")


def _check_config(path: Path, config: Any) -> None:
    """Refuse what is known from the configuration alone, before gigabytes are read."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config.model_type
    if config.is_encoder_decoder or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(f"{path}: {kind!r} is not a decoder that generates text")
    text = config.get_text_config()
    if getattr(text, "kv_lora_rank", None):
        raise ModelError(f"{path}: multi-head latent attention (MLA) is not supported")
    for layer_type in getattr(text, "layer_types", None) or ():
        if layer_type not in _LAYER_TYPES:
            raise ModelError(f"{path}: layers of type {layer_type!r} are not supported")
    for rope_type in _rope_types(text):
        if rope_type in _BATCH_DEPENDENT_ROPE:
            raise ModelError(
                f"{path}: rope of type {rope_type!r} changes with the longest sequence "
                "of a batch, which is not supported"
            )


def _load_directory(path: Path, dtype: str) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(path, **local)
    except Exception as error:
        # Wrong fields come back as errors of the hub library's own.
        raise ModelError(f"{path / 'config.json'}: {_line(error)}") from error
    _check_config(path, config)
    try:
        return AutoModelForCausalLM.from_pretrained(  # type: ignore[no-any-return]
            path,
            config=config,
            dtype=DTYPES[dtype],
            attn_implementation=ATTENTION,
            output_loading_info=True,
            # So that what does not fit is told by name, in `_check_loaded`.
            ignore_mismatched_sizes=True,
            **local,
        )
    except Exception as error:
        # Damaged weights come back as errors of the safetensors library's own and of others.
        raise ModelError(f"{path}: {_line(error)}") from error


def _load_gguf(path: Path, dtype: str) -> tuple[Any, dict[str, Any]]:
    import transformers

    options: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent,
            dtype=DTYPES[dtype],
            attn_implementation=ATTENTION,
            output_loading_info=True,
            **options,
        )
    except Exception as error:
        # The reader has no error type of its own for files that it cannot make sense of.
        raise ModelError(f"{path}: {_line(error)}") from error
    _check_config(path, model.config)
    return model, info


def _check_loaded(path: Path, info: dict[str, Any]) -> None:
    for key, what in (("missing_keys", "lack"), ("mismatched_keys", "do not fit the shape of")):
        # Mismatched ones come as (name, shape in the file, shape in the model).
        found = [name if isinstance(name, str) else name[0] for name in info.get(key) or ()]
        if names := sorted(found):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(f"{path}: the weights {what} {names[0]}{more}")


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """Ids that end an answer: the generation config's, which may know more than the model's."""
    for config in (model.generation_config, model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (ids,)
    return ()


def _rope_parameters(config: Any) -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or {})


def _rope_types(config: Any) -> list[str]:
    """Types of rotary embedding in use: one, or one per type of layer."""
    parameters = _rope_parameters(config)
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return [str(part.get("rope_type", "default")) for part in nested or [parameters]]


def _rope(config: Any) -> str:
    """Rotary embedding as canonical JSON: equal strings mean equal rotations."""
    return json.dumps(_rope_parameters(config), sort_keys=True, separators=(",", ":"))
