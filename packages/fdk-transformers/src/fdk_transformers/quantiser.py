"""FdkQuantiser: what ``from_pretrained`` and ``save_pretrained`` of transformers call."""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.base import HfQuantizer

from fdk_formats import quantise_model
from fdk_formats.backends import all_backends, select
from fdk_formats.embedding import QuantisedEmbedding
from fdk_formats.experts import (
    ExpertLinear,
    QuantisedExpertLinear,
    QuantisedExperts,
    experts_like,
    is_experts,
    layers_and_projections,
)
from fdk_formats.files import stopper, stored_weights, weights_metadata
from fdk_formats.format import Format
from fdk_formats.layer_kinds import kind_of, matrix_of
from fdk_formats.linear import QuantisedLinear
from fdk_formats.packed_module import PackedModule, link_layers
from fdk_formats.quantise import quantise, quantise_stack
from fdk_formats.quantised_module import PREFIX, QuantisedModule
from fdk_formats.stored_weight import problem_of
from fdk_formats.tensor import relative_error
from fdk_transformers.config import FdkConfig

# Names of the tensors of a quantised weight.
FIELDS = ("packed", "scale", "codebook", "zero_point")


class FdkQuantiser(HfQuantizer):
    """The quantiser of transformers for models of fdk, see ``FdkConfig``.

    A linear layer becomes a ``QuantisedLinear`` when its weight is read from the checkpoint, so
    one layer in 16 bits is in memory at a time. Layers of a saved folder are replaced before its
    tensors are read, as the metadata of its files say.

    Args:
        quantization_config: the settings.
        pre_quantized: whether the folder holds a quantised model.
    """

    requires_calibration = False
    quantization_config: FdkConfig

    def __init__(self, quantization_config: FdkConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # Formats of the layers to quantise, by the first name of each.
        self.formats: dict[str, Format] = {}
        # The names of layers that share a weight, by each of them.
        self.tied: dict[str, list[str]] = {}
        # Layers whose own weight was read.
        self.loaded: set[str] = set()
        self.importances: dict[str, Tensor] = {}
        self.conv1d: set[str] = set()
        # Names of the modules of experts with projections to quantise.
        self.mixtures: set[str] = set()
        # Parameters whose conversion by transformers makes several, of which some are quantised.
        self.first_targets: list[str] = []

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError for a format that is missing, or a backend that does not exist."""
        if not self.pre_quantized and self.quantization_config.format is None:
            raise ValueError('FdkConfig: wanted a format, such as FdkConfig("kmeans4-g64")')
        known = ["auto", *all_backends()]
        if self.quantization_config.backend not in known:
            got = self.quantization_config.backend
            raise ValueError(f"FdkConfig: backend must be one of {', '.join(known)}, got {got!r}")

    @property
    def quantises_whole_model(self) -> bool:
        """True if the model has to be loaded in 16 bits before it is quantised."""
        config = self.quantization_config
        return not self.pre_quantized and (config.calibration is not None or bool(config.fuse))

    # Before the weights are loaded

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        self.conv1d = {name for name, m in model.named_modules() if kind_of(m) == "conv1d"}
        if self.pre_quantized:
            self._replace_stored_layers(model, checkpoint_files or [])
        elif not self.quantises_whole_model:
            self._plan(model)

    def _plan(self, model: Any) -> None:
        """Chooses formats by the rules of ``quantise_model``, which also warns of what is left."""
        plan = copy.deepcopy(model)  # on the meta device: it costs no memory
        for target, owner in plan.all_tied_weights_keys.items():  # tie_weights is off until later
            parent, _, attribute = target.rpartition(".")
            setattr(plan.get_submodule(parent), attribute, plan.get_parameter_or_buffer(owner))
        sharing: dict[int, list[str]] = {}
        for name, module in layers_and_projections(plan):
            if kind_of(module) is not None:
                sharing.setdefault(id(module.weight), []).append(name)
        rules = self.quantization_config.rules()
        importance = rules.pop("importance") or {}
        plan = quantise_model(plan, **rules, inplace=True, progress=False, importance=None)
        planned_modules = dict(plan.named_modules())
        self.formats = {
            name: m.format for name, m in planned_modules.items() if isinstance(m, QuantisedModule)
        }
        self.mixtures = {
            name for name, m in planned_modules.items() if isinstance(m, QuantisedExperts)
        }
        for names in sharing.values():
            planned = [name for name in names if name in self.formats]
            self.tied |= dict.fromkeys(planned, planned)
            if given := [importance[name] for name in planned if name in importance]:
                self.importances |= dict.fromkeys(planned, sum(given))
        if unknown := importance.keys() - self.formats.keys():
            raise ValueError(
                f"FdkConfig: importance names {', '.join(sorted(unknown))}, wanted names of layers "
                f"to quantise: {', '.join(self.formats)}"
            )

    def _replace_stored_layers(self, model: Any, files: list[str]) -> None:
        """Makes the layers of a saved folder quantised ones, on the meta device."""
        if not files:
            raise ValueError(
                "FdkConfig: a quantised model is loaded from its files, got state_dict: make the "
                "model with from_config, and use fdk_formats.load_model"
            )
        weights, aliases, names = stored_weights(files)
        aliases = {alias: target for alias, target in aliases.items() if target in weights}
        dtype = model.dtype
        places = _places(model, [*weights, *aliases])
        tied: dict[str, str] = {}
        stacks: dict[str, dict[str, Format]] = {}  # of each module of experts
        for stored_name, (format, shape) in weights.items():
            layer = stored_name.removesuffix(".weight")
            name = places[stored_name]
            if name is None:  # the head of another model class
                continue
            if len(shape) == 3:
                stacks.setdefault(name.rpartition(".")[0], {})[name] = format
            _check_shape(model, name, stored_name, shape)
            wanted = _planned_dtype(model, name, dtype)
            if len(shape) == 3:
                continue
            self._replace(model, name, format, wanted, f"{layer}.input_permutation" in names)
        for mixture, formats in stacks.items():
            self._replace_experts(model, mixture, formats, _planned_dtype(model, mixture, dtype))
        for alias, target in aliases.items():
            alias_name, target_name = places[alias], places[target]
            if alias_name and target_name:
                owner = model.get_submodule(target_name)
                if model.get_submodule(alias_name) is not owner:
                    wanted = _planned_dtype(model, alias_name, dtype)
                    self._replace(model, alias_name, owner.format, wanted, False)
                    tied[alias_name] = target_name
        for target, source in model.all_tied_weights_keys.items():
            both = target.removesuffix(".weight"), source.removesuffix(".weight")
            owners = [model.get_submodule(each.rpartition(".")[0]) for each in (target, source)]
            if all(isinstance(owner, QuantisedModule) for owner in owners):
                tied[both[0]] = both[1]
        for alias_name, target_name in tied.items():
            names_of = self.tied.setdefault(target_name, [target_name])
            names_of.append(alias_name)
            self.tied[alias_name] = names_of
            _tie_keys(model, alias_name, target_name, model.get_submodule(target_name).format)
        # An empty tensor stops loaders that do not know the format; some files have buffers that
        # the model makes itself.
        ignored = {re.escape(name) + "$" for name in weights}
        ignored |= {re.escape(name) + "$" for name, _ in model.named_buffers()}
        known = model._keys_to_ignore_on_load_unexpected or set()
        model._keys_to_ignore_on_load_unexpected = set(known) | ignored

    def _replace(
        self, model: Any, name: str, format: Format, dtype: torch.dtype, permuted: bool = False
    ) -> QuantisedModule:
        """Replaces a layer by its quantised counterpart on the meta device."""
        source = model.get_submodule(name)
        made: QuantisedModule
        if kind_of(source) == "embedding":
            sizes = source.num_embeddings, source.embedding_dim, source.padding_idx
            made = QuantisedEmbedding(*sizes, "meta", dtype, format=format)
        else:
            n, k = matrix_of(source).shape
            config = self.quantization_config
            made = QuantisedLinear(
                k, n, False, "meta", dtype,
                format=format, backend=config.backend, activations=config.activations,
            )  # fmt: skip
            made.bias = source.bias
            if permuted:
                buffer = torch.empty(k, dtype=torch.int32, device="meta")
                made.register_buffer("input_permutation", buffer)
        made.train(source.training)
        _set_everywhere(model, source, made)
        return made

    def _replace_experts(
        self, model: Any, name: str, formats: Mapping[str, Format], dtype: torch.dtype
    ) -> None:
        """Replaces a module of experts by its quantised counterpart on the meta device.

        Args:
            model: the model.
            name: of the module.
            formats: of its projections to quantise, by their full names.
            dtype: dtype of the activations.
        """
        source, made = model.get_submodule(name), {}
        for full_name, format in formats.items():
            projection = ExpertLinear(source, full_name.removeprefix(f"{name}."))
            experts, n, k = projection.stack().shape
            backend = self.quantization_config.backend
            layer: Any = QuantisedExpertLinear(
                experts, k, n, False, "meta", dtype, format=format, backend=backend
            )
            layer.bias = projection.bias
            made[projection.name] = layer.train(source.training)
        mixture = experts_like(source, made)
        mixture.take_over(source)
        _set_everywhere(model, source, mixture)

    # While the weights are loaded

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Returns whether a parameter of the checkpoint goes to ``QuantiseOnLoad``."""
        if self.pre_quantized:
            return False
        layer, _, field = param_name.rpartition(".")
        if (field == "weight" and layer in self.formats) or layer in self.mixtures:
            return True
        return any(target in param_name for target in self.first_targets)

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Returns the bytes of an element, with which device maps are made."""
        layer, _, field = param_name.rpartition(".")
        if param_name in self.formats and layer in self.mixtures:
            k = ExpertLinear(model.get_submodule(layer), field).stack().shape[-1]
            return self.formats[param_name].bits_per_weight(k) / 8
        if field == "weight" and layer in self.formats:
            k = matrix_of(model.get_submodule(layer)).shape[1]
            return self.formats[layer].bits_per_weight(k) / 8
        return float(param.element_size())

    def get_quantize_ops(self) -> Any:
        """Returns the operation that quantises parameters."""
        from fdk_transformers.conversion import QuantiseOnLoad

        return QuantiseOnLoad(self)

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """Returns the dtype to cast a tensor of a saved folder to; ours keep theirs."""
        target = converter.target_patterns[0]
        if target.endswith(tuple(PREFIX + field for field in FIELDS)):
            return None
        return super().get_new_dtype(converter, param, dtype)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> Any:
        """Returns the conversions of a checkpoint: a saved folder has the names of the modules."""
        from fdk_transformers.conversion import renamings_of_files

        if self.pre_quantized:
            return renamings_of_files(FIELDS)
        targets = [getattr(each, "target_patterns", []) for each in weight_conversions]
        self.first_targets = [names[0] for names in targets if len(names) > 1]
        return weight_conversions

    def quantise_parameter(
        self, model: Any, name: str, value: Tensor, missing: set[str]
    ) -> dict[str, Tensor]:
        """Quantises a weight that was read, and replaces its layer.

        Args:
            model: the model.
            name: dotted name of the weight.
            value: the weight.
            missing: names that are still missing.

        Returns:
            The tensors of the quantised weight, by name.
        """
        layer = name.removesuffix(".weight")
        source = model.get_submodule(layer)
        if value.shape != source.weight.shape:
            raise ValueError(
                f"{name}: wanted {list(source.weight.shape)}, got {list(value.shape)}: a model is "
                f"quantised before it is sharded; save it, and shard what load_model returns"
            )
        format, is_conv1d = self.formats[layer], layer in self.conv1d
        matrix = value.t() if is_conv1d else value
        q = quantise(matrix, format, self.importances.get(layer))
        made = self._swap(model, layer, value.dtype, missing)
        made.relative_error = relative_error(matrix, q)
        # Others that share the weight get it too, unless the checkpoint has one for them.
        self.loaded.add(layer)
        layers = [layer, *(name for name in self.tied[layer] if name not in self.loaded)]
        tensors = q.tensors().items()
        return {f"{name}.{PREFIX}{field}": tensor for name in layers for field, tensor in tensors}

    def quantise_experts(
        self, model: Any, name: str, value: Any, missing: set[str]
    ) -> dict[str, Any]:
        """Quantises a parameter of experts that was read, or renames one that is left as it is.

        The module of experts is replaced when its first parameter is read.

        Args:
            model: the model.
            name: dotted name of the parameter.
            value: the parameter.
            missing: names that are still missing.

        Returns:
            The tensors by name.
        """
        owner, _, own = name.rpartition(".")
        source = model.get_submodule(owner)
        if not isinstance(source, QuantisedExperts):
            projections = [p.name for _, p in layers_and_projections(source) if kind_of(p)]
            formats = {
                f"{owner}.{each}": self.formats[f"{owner}.{each}"]
                for each in projections
                if f"{owner}.{each}" in self.formats
            }
            before = {f"{owner}.{each}" for each, _ in source.named_parameters(recurse=False)}
            wanted = _planned_dtype(model, owner, value.dtype)
            self._replace_experts(model, owner, formats, wanted)
            source = model.get_submodule(owner)
            missing -= before
            missing |= {f"{owner}.{each}" for each, _ in source.named_parameters()}
        if own.endswith("_bias"):
            return {f"{owner}.{own.removesuffix('_bias')}.bias": value}
        if name not in self.formats:
            return {f"{name}.weight": value}
        stack = value.transpose(1, 2) if source.is_transposed else value
        layer = source.get_submodule(own)
        if stack.shape != layer.weight_shape:
            raise ValueError(
                f"{name}: wanted {list(layer.weight_shape)}, got {list(stack.shape)}: a model is "
                f"quantised before it is sharded; save it, and shard what load_model returns"
            )
        q = quantise_stack(stack, self.formats[name], self.importances.get(name))
        layer.relative_error = relative_error(stack, q)
        return {f"{name}.{PREFIX}{field}": tensor for field, tensor in q.tensors().items()}

    def _swap(self, model: Any, layer: str, dtype: torch.dtype, missing: set[str]) -> Any:
        """Replaces a layer, and those that share its weight, and renames the parameters."""
        format = self.formats[layer]
        for name in self.tied[layer]:
            if isinstance(model.get_submodule(name), QuantisedModule):
                continue
            self._replace(model, name, format, dtype)
            missing.discard(f"{name}.weight")
            missing |= {f"{name}.{PREFIX}{field}" for field in format.tensor_names}
            target = model.all_tied_weights_keys.get(f"{name}.weight", "")
            if target.removesuffix(".weight") in self.tied[layer]:
                _tie_keys(model, name, target.removesuffix(".weight"), format)
        return model.get_submodule(layer)

    # After the weights are loaded

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        from fdk_transformers.conversion import renamings_of_files

        if self.quantises_whole_model:
            self._quantise_whole(model)
        layers = quantised_layers(model)
        for name, layer in layers.items():
            for parameter in layer.weight_parameters:
                parameter.requires_grad_(False)
            if is_offloaded(layer):
                continue
            if self.pre_quantized:
                layer.stored.quantised().check_values(name)
            if isinstance(layer, PackedModule):
                sizes = layer.format, layer.weight_shape, layer.dtype, layer.device
                problem = problem_of(*sizes, layer.activations)
                layer.backend_name = select(problem, layer.backend).name
        for name, names in self.tied.items():
            if f"{name}.{PREFIX}packed" in model.all_tied_weights_keys:  # not where two differ
                _share_weight(layers.get(name), layers.get(names[0]))
        link_layers(model)
        # save_pretrained applies these in reverse: files have the names that fdk_formats uses.
        model._weight_conversions = renamings_of_files(FIELDS)
        # By this PEFT, TRL and Trainer know a model whose frozen weights are quantised.
        model.is_loaded_in_8bit = True
        saved = self.quantization_config.saved()
        self.quantization_config = model.config.quantization_config = saved
        self.importances = {}
        return model

    def _quantise_whole(self, model: Any) -> None:
        config = self.quantization_config
        if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            raise ValueError(
                "FdkConfig: calibration and fuse need the model on one device, got "
                f"{model.hf_device_map}: pass device_map='cpu' or a GPU, or quantise with "
                "`python -m fdk_formats`, whose folder from_pretrained opens on any devices"
            )
        settings = ["activations", "backend", "calibration", "fuse"]
        settings += [] if config.epochs is None else ["epochs"]
        arguments = config.rules() | {name: getattr(config, name) for name in settings}
        quantise_model(model, **arguments, inplace=True)
        _tie_quantised(model, quantised_layers(model))

    # Saving

    def is_serializable(self) -> bool:
        """Returns True: ``save_pretrained`` works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: adapters can be trained, with ``peft``."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True: layers are traced by torch.compile."""
        return True

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Returns what ``save_pretrained`` writes into each file."""
        layers = quantised_layers(model)
        aliases = dict(_aliases(model, layers))
        stored = {name: layer for name, layer in layers.items() if name not in aliases}
        state = dict(model.state_dict())
        for alias in aliases:
            for name in layers[alias].weight_names:
                state.pop(f"{alias}.{name}", None)
        weights = {
            f"{name}.weight": (layer.format, layer.weight_shape) for name, layer in stored.items()
        }
        state |= stopper(list(weights))
        names = {f"{alias}.weight": f"{target}.weight" for alias, target in aliases.items()}
        return state, weights_metadata(weights, names)

    # Dequantising

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # after a save
        with torch.device("meta"):  # tells which layers were of which kind
            empty = type(model)._from_config(copy.deepcopy(model.config))
        layers = quantised_layers(model)
        for name, layer in layers.items():  # before any layer is replaced
            if is_offloaded(layer):
                raise ValueError(
                    f"dequantize: {name} is offloaded: load the model with another device_map"
                )
        for name, layer in layers.items():
            if isinstance(layer, QuantisedExpertLinear):
                continue
            like = empty.get_submodule(name.removesuffix(".base_layer"))  # PEFT's wrapper
            _set_everywhere(model, layer, _dense_like(layer, like, dtype))
        for name, mixture in list(model.named_modules()):
            if isinstance(mixture, QuantisedExperts):
                dense = _dense_experts(mixture, empty.get_submodule(name), dtype)
                _set_everywhere(model, mixture, dense)
        model._weight_conversions, model.is_loaded_in_8bit = None, False
        model.tie_weights()
        model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
        return model


def attach(model: Any) -> None:
    """Makes a model that ``quantise_model`` or ``load_model`` made one that transformers can save.

    Args:
        model: any module; those that are not of transformers are left as they are.
    """
    from transformers import PreTrainedModel

    layers = quantised_layers(model)
    if not isinstance(model, PreTrainedModel) or not layers:
        return
    _tie_quantised(model, layers)
    if getattr(model, "hf_quantizer", None) is not None:
        return
    first = next(iter(layers.values()))
    config = FdkConfig(first.format, activations=activations_of(layers.values()))
    quantiser: Any = FdkQuantiser(config)
    # Not is_quantized, with which transformers would refuse half() and float().
    model.hf_quantizer = quantiser
    model.quantization_method = quantiser.quantization_config.quant_method
    quantiser._process_model_after_weight_loading(model)


def quantised_layers(model: nn.Module) -> dict[str, Any]:
    """Returns the quantised layers of a model by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantisedModule)}


def activations_of(layers: Iterable[Any]) -> str:
    """Returns ``int8`` if a layer rounds its input to 8 bits, else ``float``."""
    rounds = any(getattr(layer, "activations", "float") == "int8" for layer in layers)
    return "int8" if rounds else "float"


def is_offloaded(layer: QuantisedModule) -> bool:
    """Returns whether accelerate keeps the weight elsewhere between calls."""
    return any(parameter.device.type == "meta" for parameter in layer.weight_parameters)


def _share_weight(layer: Any, owner: Any) -> None:
    """Gives a layer the weight of another. An embedding and a head have each a layout of their own.

    transformers has tied the parameters, which is right for layers of one kind only.
    """
    if layer is None or owner is None or layer is owner or is_offloaded(layer):
        return
    if type(layer) is type(owner):
        layer.tie_weight(owner)
        return
    for field, tensor in owner.stored.quantised().tensors().items():
        setattr(layer, PREFIX + field, nn.Parameter(tensor, requires_grad=False))


def _aliases(model: Any, layers: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields quantised layers with the weight of another, and that one."""
    owners: dict[int, str] = {}
    for name, layer in layers.items():
        owner = None
        target = model.all_tied_weights_keys.get(f"{name}.{PREFIX}packed")
        if target is not None:
            owner = target.removesuffix(f".{PREFIX}packed")
        elif not is_offloaded(layer):
            owner = owners.setdefault(id(layer.stored), name)
        if owner is not None and owner != name and owner in layers:
            yield name, owner


def _places(model: Any, names: Iterable[str]) -> dict[str, str | None]:
    """Returns, for each stored weight, the name of its layer in a model.

    The model may be the base model of the saved one, or have it. None are heads that the model does
    not have.

    Raises:
        ValueError: if a layer is missing that is no head: its weights would be made up.
    """
    prefix = f"{model.base_model_prefix}."
    modules = {name for name, _ in layers_and_projections(model, remove_duplicate=False)}
    layers = {name: name.rpartition(".")[0] for name in names}
    has_base_model = any(layer.startswith(prefix) for layer in layers.values())
    places: dict[str, str | None] = {}
    for name, layer in layers.items():
        candidates = layer, layer.removeprefix(prefix), prefix + layer
        places[name] = next((each for each in candidates if each in modules), None)
        if places[name] is None and (layer.startswith(prefix) or not has_base_model):
            raise ValueError(
                f"{name}: {type(model).__name__} has no layer {layer!r}: load the folder with the "
                f"class, and the version of transformers, that it was saved with"
            )
    return places


def _check_shape(model: nn.Module, name: str, stored_name: str, shape: tuple[int, ...]) -> None:
    parent, _, own = name.rpartition(".")
    owner: Any = model.get_submodule(parent)
    is_stack = is_experts(owner) and own in owner._parameters
    module: Any = ExpertLinear(owner, own) if is_stack else model.get_submodule(name)
    found = None if kind_of(module) is None else tuple(matrix_of(module).shape)
    if found != shape:
        raise ValueError(
            f"{stored_name} needs a Linear, Embedding, Conv1D or experts of weight {list(shape)}, "
            f"the model has {type(module).__name__} {'' if found is None else list(found)}"
        )


def _planned_dtype(model: Any, name: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a layer: some models keep some layers in float32."""
    for pattern, wanted in model._get_dtype_plan(dtype).items():
        if re.search(pattern.replace("*", ".*"), f"{name}.weight"):
            return wanted  # type: ignore[no-any-return]
    owner: Any = model.get_submodule(name.rpartition(".")[0])
    module = owner if name.rpartition(".")[2] in owner._parameters else model.get_submodule(name)
    own: torch.dtype = next(module.parameters()).dtype
    return own


def _tie_keys(model: Any, name: str, target: str, format: Format) -> None:
    """Ties the tensors of two quantised layers in the place of their weights."""
    model.all_tied_weights_keys.pop(f"{name}.weight", None)
    for field in format.tensor_names:
        key = f"{name}.{PREFIX}{field}"
        model.all_tied_weights_keys[key] = f"{target}.{PREFIX}{field}"


def _tie_quantised(model: Any, layers: Mapping[str, Any]) -> None:
    """Ties the tensors of all quantised layers whose weights the model ties."""
    for key, target in list(model.all_tied_weights_keys.items()):
        name, owner = key.removesuffix(".weight"), target.removesuffix(".weight")
        if name in layers and owner in layers:
            _tie_keys(model, name, owner, layers[name].format)


def _set_everywhere(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replaces a module under each of its names."""
    for parent in list(model.modules()):
        for attribute, child in parent._modules.items():
            if child is old:
                parent._modules[attribute] = new


def _dense_experts(mixture: Any, like: Any, dtype: torch.dtype | None) -> nn.Module:
    """Makes the module of transformers of quantised experts; ``like`` is one on meta."""
    made = copy.deepcopy(like)
    for name, projection in mixture.named_children():
        if isinstance(projection, QuantisedExpertLinear):
            weight = projection.dequantise(dtype)
            weight = weight.transpose(1, 2).contiguous() if mixture.is_transposed else weight
            made._parameters[name] = nn.Parameter(weight, requires_grad=False)
        elif isinstance(projection, ExpertLinear):
            made._parameters[name] = projection.weight
        else:
            continue
        if projection.bias is not None:
            made._parameters[f"{name}_bias"] = projection.bias
    made.train(mixture.training)
    return made  # type: ignore[no-any-return]


def _dense_like(layer: Any, like: Any, dtype: torch.dtype | None) -> nn.Module:
    """Makes the layer in 16 bits of a quantised one; ``like`` is one of its kind on meta."""
    weight = layer.dequantise(dtype)
    made = copy.deepcopy(like)
    if kind_of(like) == "conv1d":
        weight = weight.t().contiguous()
    made.weight = nn.Parameter(weight, requires_grad=False)
    if isinstance(layer, QuantisedLinear):
        made.bias = layer.bias
    if hasattr(layer, "_hf_hook"):
        from accelerate.hooks import (  # type: ignore[import-untyped]
            add_hook_to_module,
            remove_hook_from_module,
        )

        hook = layer._hf_hook
        remove_hook_from_module(layer)
        add_hook_to_module(made, hook)
    made.train(layer.training)
    return made  # type: ignore[no-any-return]
