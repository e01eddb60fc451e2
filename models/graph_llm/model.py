"""The Graph-LLM: a language model that reads one projected graph token (RAS, section 3.4, figure 2, eq. 2 and 8).

The model is structured like the vision-language models of transformers: `graph_encoder`, `projector`, `language_model`,
and a placeholder token in `input_ids`. The projected graph replaces the embedding of the placeholder. Trainer, PEFT,
`generate` and `save_pretrained` work with the model unchanged.

Shapes: B samples, T tokens, W width of the language model, H graph width, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, ClassVar

import torch
from torch import nn
from torch_geometric.data import Batch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import ModelOutput

from tripletune.core.data.graph_settings import GraphSettings
from tripletune.core.data.records import IGNORED
from tripletune.models.graph_llm.graphs import GraphEncoder
from tripletune.models.losses import label_logits, label_loss


class GraphLLMConfig(GraphSettings, PretrainedConfig):
    """Configuration of a `GraphLLM`.

    Attributes:
        text_config: Configuration of the language model.
        base_model: Spec of the base model, without its revision.
        base_revision: Commit of the base model on the hub; None for folders and packages.
        base_weights: Fingerprint of the base model; see `models.adapters.check_base`.
        encoder_weights: Fingerprint of the text encoder; "" without a graph.
        text_embedding_width: Width D of the vectors of node and edge texts.
        graph_token_id: The placeholder's token id; None without a graph.
        graph_token_norm: Norm to which the graph token is scaled after the projector's offset is removed, since that
            offset hides the differences between graphs; None leaves the token unchanged (paper).
    """

    model_type = "graph_llm"
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": AutoConfig}

    text_config: Any = None
    base_model: str = ""
    base_revision: str | None = None
    base_weights: str = ""
    encoder_weights: str = ""
    text_embedding_width: int = 1024
    graph_token_id: int | None = None
    graph_token_norm: float | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Read the configuration of the language model, and the settings of older checkpoints under today's names.

        transformers passes `kwargs`, the fields of its own configuration, and checks them.
        """
        if isinstance(self.text_config, dict):
            self.text_config = AutoConfig.for_model(**self.text_config)
        if self.graph_token_norm is not None:  # older checkpoints have no `graph_token`
            self.graph_token = "normalised"
        super().__post_init__(**kwargs)


class Projector(nn.Sequential):
    """Map (B, H) to (B, W) by two linear layers with a sigmoid between them (authors' code; table 8).

    Args:
        in_width: Width H of a graph's vector.
        width: Width of the hidden layer.
        out_width: Width W of a token embedding of the language model.
        bias: Whether the layers have biases.
    """

    up: nn.Linear
    sigmoid: nn.Sigmoid
    out: nn.Linear

    def __init__(self, in_width: int, width: int, out_width: int, bias: bool = True) -> None:
        # Modules in the order of their random numbers; `nn.Sequential` takes them when it is initialised.
        up = nn.Linear(in_width, width)
        out = nn.Linear(width, out_width, bias=bias)
        super().__init__(OrderedDict(up=up, sigmoid=nn.Sigmoid(), out=out))


class NormalisedProjector(Projector):
    """A projector without the offset that all graphs share: a token has norm `norm`, or 0 for the empty graph.

    Args:
        in_width: Width H of a graph's vector.
        width: Width of the hidden layer.
        out_width: Width W of a token embedding.
    """

    def __init__(self, in_width: int, width: int, out_width: int, norm: float) -> None:
        super().__init__(in_width, width, out_width, bias=False)
        self.norm = norm

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map encoded graphs (B, H) to graph tokens (B, W).

        The image of the zero vector is subtracted, which is the offset that all graphs share.
        """
        # Graphs differ by only a few hundredths of the offset; bfloat16 would round these differences.
        with torch.autocast(input.device.type, enabled=False):
            vectors = input.to(self.up.weight.dtype)
            hidden = self.sigmoid(self.up(torch.cat([vectors, torch.zeros_like(vectors[:1])])))
            return self.norm * nn.functional.normalize(self.out(hidden[:-1] - hidden[-1:]), dim=-1, eps=1e-4)


class GraphLLM(PreTrainedModel, GenerationMixin):
    """Graph encoder, projector and a causal language model of any decoder family with attention (not pure Mamba).

    Without `language_model`, a language model with random weights is built from `config.text_config`.
    """

    config_class = GraphLLMConfig
    base_model_prefix = "language_model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    # Whether logits can be computed at label positions only; see `models.losses.scales_logits_alike`.
    labels_only = True
    # Whether training packs rows end to end; see `models.attention`.
    end_to_end = False
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: GraphLLMConfig, language_model: PreTrainedModel | None = None) -> None:
        """Put the modules together.

        The order of the graph modules is that of their random numbers, so a run with the same seed starts alike.
        """
        super().__init__(config)
        if language_model is None:
            language_model = AutoModelForCausalLM.from_config(config.text_config)
        elif language_model.config._attn_implementation is None:
            # Sharing the configuration with a composite model resets the attention: set the fastest kernel that the
            # family supports (some families, for example Gemma 2, do not have scaled_dot_product_attention).
            attention = language_model.get_correct_attn_implementation(None, True)
            language_model.set_attn_implementation(attention)
            if language_model.config._attn_implementation is None:
                # Old families, such as GPT-J, ignore this setter, and without a name they would get no causal mask.
                language_model.config._attn_implementation = attention
        self.language_model = language_model
        self._no_split_modules = list(getattr(language_model, "_no_split_modules", None) or [])
        if config.use_graph:
            self.graph_encoder = GraphEncoder(config, config.text_embedding_width)
            widths = config.graph_hidden_width, config.projector_width, config.text_config.hidden_size
            if config.graph_token_norm is None:
                self.projector = Projector(*widths)
            else:
                self.projector = NormalisedProjector(*widths, config.graph_token_norm)
        if hasattr(language_model, "generation_config"):
            self.generation_config = language_model.generation_config
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        # Every part initialises itself; the default would overwrite a loaded language model.
        return

    def get_output_embeddings(self) -> nn.Module:
        """The language model's output layer."""
        return self.language_model.get_output_embeddings()

    def get_decoder(self) -> nn.Module:
        """The language model without its output layer."""
        return self.language_model.get_decoder()

    def embed_inputs(self, input_ids: torch.Tensor, graph_embeds: torch.Tensor | None) -> torch.Tensor:
        """Token embeddings (B, T, W) of `input_ids` (B, T), in which `graph_embeds` replace the placeholders.

        Without a placeholder, one graph token may still be given, so that the graph modules get a (zero) gradient.
        """
        token_id = self.config.graph_token_id
        embed = self.language_model.get_input_embeddings()
        if token_id is None:
            return embed(input_ids)
        is_graph = input_ids == token_id
        # The placeholder may be outside the vocabulary: look up token 0 instead.
        embeds = embed(torch.where(is_graph, 0, input_ids))
        if graph_embeds is None:
            if bool(is_graph.any()):
                raise ValueError("input_ids hold a graph placeholder, but no graphs were passed")
            return embeds
        placeholders = int(is_graph.sum())
        graphs = graph_embeds.shape[0]
        is_for_gradient = placeholders == 0 and graphs == 1
        if placeholders != graphs and not is_for_gradient:
            raise ValueError(f"{graphs} graphs were passed for {placeholders} graph placeholders")
        return embeds.masked_scatter(is_graph.unsqueeze(-1), graph_embeds.to(embeds.dtype))

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        graphs: Batch | None = None,
        graph_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        label_weights: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        full_logits: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> ModelOutput:
        """Run the model; `kwargs` are more arguments of the language model, which checks them.

        Args:
            input_ids: (B, T) tokens, with placeholders where the model uses graphs.
            attention_mask: (B, T).
            position_ids: (B, T); by default counted from the attention mask.
            inputs_embeds: (B, T, W) instead of `input_ids`.
            graphs: PyG batch of the graphs, row after row in the order of their placeholders.
            graph_embeds: (placeholders, W) graph tokens, if they are already computed.
            labels: (B, T), -100 where nothing is learned; this method shifts them.
            label_weights: (B, T), weights of the label tokens in the mean; by default 1.
            past_key_values: Keys and values of earlier tokens, for versions of transformers before 5.24.
            cache: The same for transformers 5.24 and later.
            logits_to_keep: As in transformers, for generation.
            full_logits: With labels, also compute logits where nothing is learned (for tests and analysis).
            num_items_in_batch: Number of label tokens, or the sum of their weights, in the whole optimiser step.

        Returns:
            Without labels, the language model's own output, with logits (B, T, V) and cache. With labels, the loss,
            which is the mean cross-entropy of label tokens, or the sum divided by `num_items_in_batch`; and the logits,
            (label tokens, V), or (B, T, V) with `full_logits`.
        """
        if inputs_embeds is None:
            if graphs is not None and self.config.use_graph:
                graph_embeds = self.projector(self.graph_encoder(graphs))
            if input_ids is None:
                raise ValueError("the model was called without input_ids and without inputs_embeds: pass one of them")
            inputs_embeds = self.embed_inputs(input_ids, graph_embeds)
        if position_ids is None and attention_mask is not None:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -inputs_embeds.shape[1] :]
        inputs = {
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            **kwargs,
        }
        # The language model accepts only the name of its version of transformers.
        if past_key_values is not None:
            inputs["past_key_values"] = past_key_values
        if cache is not None:
            inputs["cache"] = cache
        if labels is None:
            output: ModelOutput = self.language_model(**inputs, use_cache=use_cache, logits_to_keep=logits_to_keep)
            return output
        return self._loss_and_logits(inputs, labels, label_weights, num_items_in_batch, full_logits)

    def _loss_and_logits(
        self,
        inputs: dict[str, Any],
        labels: torch.Tensor,
        label_weights: torch.Tensor | None,
        num_items_in_batch: torch.Tensor | int | None,
        full_logits: bool,
    ) -> CausalLMOutput:
        """Loss and logits; `inputs` are the arguments of the language model, the others those of `forward`.

        Logits are computed at label positions only, unless the caller wants all of them or the family scales its logits
        in a way that `label_logits` does not know.
        """
        # The token at position t + 1 is learned from the logits at position t.
        keep = labels[:, 1:] != IGNORED
        targets = labels[:, 1:][keep]
        weights = None if label_weights is None else label_weights[:, 1:][keep]
        if full_logits or not self.labels_only:
            whole = self.language_model(**inputs, use_cache=False).logits
            at_labels = whole[:, :-1][keep]
            loss = label_loss(at_labels, targets, weights, num_items_in_batch)
            return CausalLMOutput(loss, whole if full_logits else at_labels)
        # Without labels, as in the filler of `train.rows.loading`, no token would be left.
        if self.end_to_end and inputs["attention_mask"] is None and bool(keep.any()):
            keep = self._lay_end_to_end(inputs, keep)
        logits = label_logits(self.language_model, keep, **inputs)
        return CausalLMOutput(label_loss(logits, targets, weights, num_items_in_batch), logits)

    @staticmethod
    def _lay_end_to_end(inputs: dict[str, Any], keep: torch.Tensor) -> torch.Tensor:
        """Change inputs with B rows so that one row holds them all, without what comes after a row's last label.

        Args:
            inputs: Arguments of the language model, changed in place; see `models.attention` for the mask.
            keep: (B, T - 1), true at label positions.

        Returns:
            `keep` for the one row, (1, needed tokens).
        """
        embeds = inputs["inputs_embeds"]
        # Tokens after the last label of a row, such as padding, are not computed.
        needed = keep.flip(1).cumsum(1).flip(1) > 0
        places = torch.arange(needed.shape[1], device=needed.device).expand_as(needed)
        inputs["inputs_embeds"] = embeds[:, :-1][needed][None]
        inputs["attention_mask"] = needed[None, None]
        inputs["position_ids"] = places[needed][None]
        return keep[needed][None]

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        """The arguments of one step of `generate`: the graph token comes only with the placeholders.

        transformers passes `kwargs` and makes the arguments; steps that read only the newest token lack placeholders.
        `embed_inputs` would refuse a graph token without a placeholder, except a single one.
        """
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)
        tokens = inputs["input_ids"]
        if "graph_embeds" in inputs and tokens is not None and not bool((tokens == self.config.graph_token_id).any()):
            del inputs["graph_embeds"]
        return inputs

    @torch.no_grad()
    def generate(self, *args: Any, graphs: Batch | None = None, **kwargs: Any) -> Any:
        """Generate as in transformers; graphs are encoded once, and beams and samples share them.

        Otherwise each step would encode the graphs again, and beams would need a copy of each graph. What is returned
        depends on the arguments: token ids, or with `return_dict_in_generate` an output object of transformers.
        """
        if graphs is not None and self.config.use_graph:
            kwargs["graph_embeds"] = self.projector(self.graph_encoder(graphs))
        return super().generate(*args, **kwargs)


AutoConfig.register(GraphLLMConfig.model_type, GraphLLMConfig)
AutoModelForCausalLM.register(GraphLLMConfig, GraphLLM)
