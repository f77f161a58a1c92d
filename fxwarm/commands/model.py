"""Models that the command line can name: a Hugging Face configuration, or a Python function that builds one."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from fxwarm import exc

BLOCK = [128, 128]
"""Weight blocks of an fp8 checkpoint that DeepGEMM serves."""


def load(
    name: str, *, layers: int | None = None, fp8: bool = False
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the model that ``name`` names, with example arguments.

    ``name`` is a folder with a config.json (or that file), or ``module:function`` that returns (model, args) or
    (model, args, kwargs). Raises OptionError or LibraryError that says what is wrong with it.
    """
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        return from_config(path, layers=layers, fp8=fp8)
    if layers is not None or fp8:
        raise exc.OptionError(
            "--layers and --fp8 are for configurations; let the function build what you want"
        )
    return from_function(name)


def from_function(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Call ``module:function`` (``build`` by default), found from the working folder on."""
    module, _, function = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        home = importlib.import_module(module)
    except ImportError as error:
        raise exc.OptionError(
            f"{name!r} is neither a folder with a config.json nor an importable module:function: {error}"
        ) from error
    build = getattr(home, function or "build", None)
    if not callable(build):
        names = [n for n in vars(home) if not n.startswith("_") and callable(getattr(home, n))]
        raise exc.OptionError(
            f"{module} has no function {function or 'build'!r}; {exc.did_you_mean(function, names)}"
        )
    try:
        built = build()
    except Exception as error:
        raise exc.OptionError(
            f"{name} raised {type(error).__name__}: {error}; call it without arguments"
        ) from error
    if (
        not isinstance(built, tuple)
        or len(built) not in (2, 3)
        or not isinstance(built[1], (tuple, list))
    ):
        raise exc.OptionError(
            f"{name} must return (model, args) or (model, args, kwargs), not {type(built).__name__}"
        )
    model, args, *rest = built
    return model, tuple(args), dict(rest[0]) if rest else {}


def from_config(
    path: Path, *, layers: int | None = None, fp8: bool = False
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Build the causal language model of a configuration on the meta device, its linears and experts as fp8 GEMMs.

    The code is transformers' own; nothing is downloaded. ``fp8`` plans for an fp8 checkpoint although the
    configuration names none.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise exc.OptionError(
            f"{file} cannot be read as a configuration: {error}; give a folder with a config.json"
        ) from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise exc.OptionError(
            f"{file} has no model_type; give the config.json of a Hugging Face model"
        )
    _check_fp8(file, values, fp8)
    if importlib.util.find_spec("transformers") is None:
        raise exc.LibraryError(
            "configurations are built by transformers' own code; install fxwarm[transformers]"
        )
    config = _config(file, values, layers)
    return _model(file, config), (_token_ids(),), {}


def _check_fp8(file: Path, values: dict[str, Any], fp8: bool) -> None:
    quantised = values.get("quantization_config") or {}
    method, block = quantised.get("quant_method"), quantised.get("weight_block_size")
    if method == "fp8" and block == BLOCK:
        return
    if method and not (fp8 and method == "fp8"):
        raise exc.OptionError(
            f"{file} is quantised by {method} in blocks of {block}; only fp8 in blocks of {BLOCK} is planned. "
            "Give module:function for a model with calls of its own"
        )
    if not fp8:
        raise exc.OptionError(
            f"{file} names no quantisation, so its linears call no JIT library; "
            "give --fp8 to plan for an fp8 checkpoint of it"
        )


def _config(file: Path, values: dict[str, Any], layers: int | None) -> Any:
    import transformers

    values = {k: v for k, v in values.items() if k not in ("quantization_config", "auto_map")}
    kind = values.pop("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise exc.OptionError(
            f"{file}: transformers {transformers.__version__} has no model_type {kind!r}; "
            f"{exc.did_you_mean(kind, transformers.CONFIG_MAPPING.keys())}"
        )
    most = values.get("num_hidden_layers")
    if layers is not None:
        if not 1 <= layers <= (most or layers):
            raise exc.OptionError(f"--layers is {layers}; {file} has 1 to {most}")
        values["num_hidden_layers"] = layers
        if isinstance(values.get("layer_types"), list):
            values["layer_types"] = values["layer_types"][:layers]
        if "first_k_dense_replace" in values:  # a cut keeps a mixture-of-experts layer
            values["first_k_dense_replace"] = min(values["first_k_dense_replace"], layers - 1)
    return transformers.AutoConfig.for_model(kind, **{**values, "use_cache": False})


def _model(file: Path, config: Any) -> Any:
    import torch
    import transformers

    from fxwarm.demo.replace import use_fp8

    kind = type(config)
    if kind not in transformers.AutoModelForCausalLM._model_mapping:
        raise exc.OptionError(
            f"{file}: {kind.__name__} is no causal language model; give module:function instead"
        )
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16
            ).eval()
            return use_fp8(model.to(torch.bfloat16))
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise exc.OptionError(
            f"{file}: the layers of {kind.__name__} cannot be replaced by fp8 GEMMs ({error}); "
            "give module:function with a model that calls them itself"
        ) from error


def _token_ids() -> Any:
    from fxwarm.demo.models import token_ids

    return token_ids()
