"""From settings to a model: by name, or from a user's own ``module:factory``."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import reduce
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.core.settings import ModelSettings
from ray_lowcomm.models.byte_gpt import ByteGPT
from ray_lowcomm.models.huggingface import build_huggingface, read_config
from ray_lowcomm.models.initial import check_files, load_weights
from ray_lowcomm.models.small_cnn import SmallCNN

MODELS: Mapping[str, Callable[..., nn.Module]] = {"byte_gpt": ByteGPT, "small_cnn": SmallCNN}


def build(
    settings: ModelSettings,
    defaults: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> nn.Module:
    """Builds the model that `settings` name, with `settings.args`, and loads `settings.init_from` into it.

    `defaults` (a data set's `model_defaults`: the size of its vocabulary, its number of classes) fill what `args` leave
    out, as far as a model of this package has such an argument; a user's own factory gets `args` alone. New weights
    come from torch's global random generator. `say` is told what the user should know.

    Raises ModelError, one line, for a name that does not exist, a factory that cannot be imported, raises or returns no
    ``torch.nn.Module``, arguments that it does not take, and weights that do not fit.
    """
    name = settings.name
    if name.startswith("hf:"):
        wrapped = build_huggingface(name.removeprefix("hf:"), settings.args)
        _check_size("vocab_size", getattr(wrapped.hf_model.config, "vocab_size", None), defaults)
        model: nn.Module = wrapped
    elif ":" in name:
        if "vocab_size_at" in (defaults or {}):  # then the size is a fact of the data, and not that of a tokenizer
            _check_size("vocab_size", settings.args.get("vocab_size"), defaults)
        model = _call(name, _find_factory(name, _import_module(name)), settings.args)
    elif name in MODELS:
        takes = inspect.signature(MODELS[name]).parameters
        known = {key: value for key, value in (defaults or {}).items() if key in takes}
        for argument in ("vocab_size", "classes"):
            _check_size(argument, settings.args.get(argument), defaults)
        model = _call(name, MODELS[name], {**known, **settings.args})
    else:
        raise _no_such_model(name)
    if settings.init_from is not None:
        for text in load_weights(model, settings.init_from):
            say(text)
    return model


def loss_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss of a batch, checked.

    Raises:
        ModelError: it is no loss, or the model wants something of a batch that these data do not give.
    """
    try:
        return check_loss(model(batch))
    except KeyError as error:
        wanted = error.args[0] if error.args else None
        if not isinstance(wanted, str) or wanted in batch:
            raise
        given = ", ".join(batch)
        raise ModelError(
            f"the model wants {wanted!r} of a batch, and the data give {given}: choose model.name and data.name "
            "that go together"
        ) from error


def check_loss(loss: object) -> Tensor:
    """Returns `loss` if it can be trained on: a 0-d floating-point tensor that depends on a parameter.

    Raises ModelError that says what it was instead.
    """
    wanted = "the model's forward(batch) must return the mean loss, a 0-d floating-point tensor"
    if not isinstance(loss, Tensor):
        raise ModelError(f"{wanted}; it returned {_describe(loss)}")
    if loss.dim() != 0 or not loss.is_floating_point():
        raise ModelError(f"{wanted}; it returned a tensor of shape {list(loss.shape)} and type {_dtype(loss.dtype)}")
    if not loss.requires_grad:
        raise ModelError(f"{wanted} that depends on a trainable parameter; it returned one without a gradient")
    return loss


def _check_size(argument: str, size: object, defaults: Mapping[str, Any] | None) -> None:
    # Otherwise the first rare token is an index error deep inside torch, hours later.
    needed = (defaults or {}).get(argument, 0)
    if isinstance(size, int) and size < needed:
        place = (defaults or {}).get(f"{argument}_at")
        raise ModelError(
            f"model.args.{argument} = {size}: the data set needs at least {needed}" + (f": {place}" if place else "")
        )


def check(settings: ModelSettings, here: bool = True) -> None:
    """Finds without weights and without calling a user's code what `build` would refuse: the name and its arguments.

    With `here` False the model is built on machines that may have other files and modules: what is missing here may be
    there. Raises ModelError as `build`.
    """
    name = settings.name
    if name.startswith("hf:"):
        if here:
            read_config(name.removeprefix("hf:"), settings.args)
    elif ":" in name:
        try:
            module = _import_module(name)
        except ModelError:
            if here:
                raise
            return
        _bind(name, _find_factory(name, module), settings.args)
    elif name in MODELS:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            _call(name, MODELS[name], settings.args)
    else:
        raise _no_such_model(name)
    if here and settings.init_from is not None:
        check_files(settings.init_from)


def _no_such_model(name: str) -> ModelError:
    return ModelError(f"model.name = {name!r}: must be one of {', '.join(MODELS)}, hf:CONFIG_DIR or module:factory")


def _import_module(name: str) -> ModuleType:
    module_name = name.partition(":")[0]
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        raise ModelError(f"model.name = {name!r}: cannot import {module_name!r}: {_cause(error)}") from error


def _find_factory(name: str, module: ModuleType) -> Callable[..., object]:
    module_name, _, attribute = name.partition(":")
    try:
        factory = reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        raise ModelError(f"model.name = {name!r}: module {module_name!r} has no {attribute!r}") from error
    if not callable(factory):
        raise ModelError(f"model.name = {name!r}: {attribute!r} is a {type(factory).__name__}, not a function")
    return factory


def _bind(name: str, factory: Callable[..., object], args: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**args)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "none"
        raise ModelError(f"model.args do not fit {name!r}: {error}; its arguments: {takes}") from error


def _call(name: str, factory: Callable[..., object], args: Mapping[str, Any]) -> nn.Module:
    _bind(name, factory, args)
    try:
        model = factory(**args)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"model.name = {name!r}: the factory raised {_cause(error)}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"model.name = {name!r}: must return a torch.nn.Module; it returned {_describe(model)}")
    return model


def _describe(value: object) -> str:
    if value is None:
        return "None"
    kind = type(value)
    text = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    if isinstance(value, dict):
        return f"a {text} with keys {', '.join(map(str, list(value)[:5]))}"
    return f"a {text}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
